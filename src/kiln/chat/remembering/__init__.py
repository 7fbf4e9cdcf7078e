"""Memory across exchanges: recalled before an answer, learned from it afterwards."""
