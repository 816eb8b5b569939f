"""Weight files of llm.c, read: which model a file describes, and its tensors, whole or box by box."""
