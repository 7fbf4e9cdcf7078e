"""`kiln chat`: a conversation in the terminal, over HTTP."""
