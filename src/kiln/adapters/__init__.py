"""LoRA adapters in PEFT format: checking, conversion for llama.cpp, revisions, storage, merging."""
