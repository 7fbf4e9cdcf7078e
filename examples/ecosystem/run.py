"""Runs evaluation and benchmark clients against a server: lm-evaluation-harness, GuideLLM, instructor.

    python examples/ecosystem/run.py [URL] [--only NAME]

Run it in the repository, with a kiln server on the bundled model. Each client is found on the PATH, or
through LM_EVAL, GUIDELLM and INSTRUCTOR_PYTHON, so that they may live in environments of their own (their
dependencies exclude each other):

    pip install "lm-eval[api]" transformers
    pip install guidellm
    pip install instructor

Nothing is downloaded: tasks and tokenizer come from the repository. docs/ecosystem.md has what it printed.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys

URL = "http://127.0.0.1:8420"
MODEL = "tiny-reasoner"
TOKENIZER = "models/tiny-reasoner"
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def commands(url: str) -> dict[str, list[str]]:
    """What is run, by name."""
    lm_eval = [os.environ.get("LM_EVAL", "lm_eval"), "run", "--include_path", "examples/ecosystem/tasks"]
    completions = f"model={MODEL},base_url={url}/v1/openai/completions,num_concurrent=4,max_retries=1"
    text = [
        *lm_eval,
        *("--model", "local-completions", "--batch_size", "4"),
        *("--model_args", f"{completions},tokenizer_backend=huggingface,tokenizer={TOKENIZER}"),
    ]
    chat = completions.replace("/completions", "/chat/completions")
    return {
        "lm-eval, local-completions, scored": [*text, "--tasks", "kiln_sums_choice"],
        "lm-eval, local-completions, generated": [*text, "--tasks", "kiln_sums_text"],
        "lm-eval, local-chat-completions": [
            *lm_eval,
            *("--model", "local-chat-completions", "--apply_chat_template"),
            *("--model_args", chat, "--tasks", "kiln_sums"),
        ],
        "guidellm": [
            *(os.environ.get("GUIDELLM", "guidellm"), "run", "--disable-progress"),
            *("--backend", json.dumps(guidellm_backend(url))),
            *("--profile", "kind=concurrent,streams=4", "--constraint", "kind=max_requests,count=40"),
            *("--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=24"),
            *("--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}", "--output", "kind=console"),
        ],
        "instructor": [
            os.environ.get("INSTRUCTOR_PYTHON", sys.executable),
            "examples/instructor_answer.py",
            url,
        ],
    }


def guidellm_backend(url: str) -> dict[str, object]:
    """GuideLLM writes `/v1` into its paths itself, so it is told where they are."""
    routes = {"/health": "health", "/v1/models": "v1/openai/models"}
    for path in ("chat/completions", "completions"):
        routes[f"/v1/{path}"] = f"v1/openai/{path}"
    return {
        "kind": "openai_http",
        "target": url,
        "model": MODEL,
        "request_format": "/v1/chat/completions",
        "api_routes": routes,
    }


def main(url: str = URL, only: str = "") -> int:
    failed = []
    for name, command in commands(url).items():
        if only not in name:
            continue
        print(f"== {name}\n$ {shlex.join(command)}", flush=True)
        try:
            status = subprocess.run(command, env={**os.environ, **OFFLINE}, timeout=600).returncode
        except FileNotFoundError as error:
            print(error)
            status = 127
        if status != 0:
            failed.append(name)
    print("failed: " + ", ".join(failed) if failed else "all ran")
    return len(failed)


if __name__ == "__main__":
    arguments = [a for a in sys.argv[1:] if a != "--only"]
    if "--only" in sys.argv:
        sys.exit(main(arguments[0] if len(arguments) > 1 else URL, only=arguments[-1]))
    sys.exit(main(*arguments[:1]))
