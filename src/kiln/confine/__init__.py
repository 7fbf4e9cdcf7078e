"""Work on untrusted data, done by a child process that can be killed and has bounds on time and memory."""
