"""Work on untrusted data, done by child processes that can be killed and have bounds on time and memory."""
