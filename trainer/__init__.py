"""Reprise: a trainer for GPT-2 and LLaMA-3 whose runs pick up exactly where they stopped."""
