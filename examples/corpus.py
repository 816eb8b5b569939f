"""A corpus by datatrove: python examples/corpus.py TEXTS tokenizer.json TOKENS local|ray; run it again after a kill."""

import sys
from pathlib import Path
from typing import Any

import ray
from datatrove.executor.local import LocalPipelineExecutor
from datatrove.executor.ray import RayPipelineExecutor
from datatrove.pipeline.readers.jsonl import JsonlReader
from datatrove.pipeline.tokens.megatron_tokenizer import MegatronDocumentTokenizer


def main(texts: Path, tokenizer: Path, tokens: Path, engine: str, end_of_text: str = "<|endoftext|>") -> None:
    pipeline = [
        JsonlReader(str(texts), glob_pattern="*.jsonl*"),  # datatrove's filters and deduplication go here
        MegatronDocumentTokenizer(str(tokens), tokenizer_name_or_path=str(tokenizer), eos_token=end_of_text),
    ]
    # A task for each file: then the files of tokens, by name, have the order of the files of text.
    tasks = len(list(texts.glob("*.jsonl*")))
    options: dict[str, Any] = {"pipeline": pipeline, "tasks": tasks, "workers": 2, "logging_dir": f"{tokens}.logs"}
    executor: Any
    if engine == "ray":
        ray.init(include_dashboard=False)
        executor = RayPipelineExecutor(**options, mem_per_cpu_gb=1)
    else:
        executor = LocalPipelineExecutor(**options)
    executor.run()
    if engine == "ray":
        ray.shutdown()
    if missing := executor.get_incomplete_ranks():
        sys.exit(f"tasks {missing} have failed: see {tokens}.logs, and run this again")
    print(f"data=megatron 'data.train={tokens.absolute()}/*.bin' data.tokenizer={tokenizer.absolute()}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
