"""Reprise: a trainer for GPT-2, LLaMA-3 and Qwen3 whose runs pick up exactly where they stopped."""
