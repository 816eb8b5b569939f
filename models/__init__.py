"""GPT-2 and LLaMA-3, their sizes and their form on disk; single-device code that imports torch only."""
