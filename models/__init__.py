"""GPT-2, LLaMA-3 and Qwen3, their sizes and their form on disk; single-device code with torch as its only import."""
