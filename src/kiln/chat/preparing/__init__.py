"""From a turn to requests for the engine, on worker threads."""
