"""Read a checkpoint and check every digest, without Reprise: python read_checkpoint.py ITER_FOLDER.

It needs numpy and xxhash. It refuses what the trainer refuses, except for limits on sizes and depth.
"""

import itertools
import json
import math
import pathlib
import stat
import sys

import numpy as np
import xxhash

TAIL_BYTES = 31
# bfloat16 and float8, which numpy lacks, come back as their bits.
TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1"}
TYPES |= {"U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "?", "F8_E4M3": "u1", "F8_E5M2": "u1"}


def require(truth, complaint):
    if not truth:
        raise ValueError(complaint)


def parse(data, where):
    """Parse standard JSON in which no key occurs twice."""

    def unique(pairs):
        require(len(dict(pairs)) == len(pairs), f"{where}: a key occurs twice")
        return dict(pairs)

    def refuse(name):
        raise ValueError(f"{where}: {name} is not standard JSON")

    return json.loads(data, object_pairs_hook=unique, parse_constant=refuse)


def read(folder, name):
    """Return the content of a regular file inside the folder; no part of its path is a link."""
    *parents, last = parts = name.split("/")
    require("\\" not in name and not {"", ".", ".."} & set(parts), f"{name!r} leaves the folder")
    for parent in parents:
        folder = folder / parent
        require(stat.S_ISDIR(folder.lstat().st_mode), f"{folder} is not a folder")
    path = folder / last
    require(stat.S_ISREG(path.lstat().st_mode), f"{path} is not a regular file")
    return path.read_bytes()


def check_blocks(name, array, entry, block_bytes):
    """Compare the blocks of a tensor, given in the shape of its view, with their digests."""
    position, shares = 0, entry.get("shares", {})
    for marks, size in zip(entry["cuts"], array.shape, strict=True):
        require(marks[0] == 0 and marks[-1] == size and marks == sorted(set(marks)), f"{name}: cuts {marks}")
    cells = list(itertools.product(*(itertools.pairwise(marks) for marks in entry["cuts"])))
    require(shares.keys() <= {str(number) for number in range(len(cells))}, f"{name}: shares of no cell")
    for number, cell in enumerate(cells):
        packed = array[tuple(slice(lo, hi) for lo, hi in cell)].tobytes()
        bounds = [0, *shares.get(str(number), []), len(packed)]
        require(bounds == sorted(set(bounds)) or bounds == [0, 0], f"{name}, cell {number}: shares {bounds}")
        for lo, hi in itertools.pairwise(bounds):
            for at in range(lo, hi, block_bytes):
                found = xxhash.xxh3_64_hexdigest(packed[at : min(at + block_bytes, hi)])
                expected, position = entry["digests"][position : position + 16], position + 16
                require(found == expected, f"{name}, cell {number}, byte {at}: damaged")
    require(position == len(entry["digests"]), f"{name}: another number of blocks")


def read_tensors(file, data, file_entry, manifest):
    """Yield the name and the array of every tensor of a safetensors file."""
    start = 8 + int.from_bytes(data[:8], "little")
    require(xxhash.xxh3_64_hexdigest(data[:start]) == file_entry["header_xxh3_64"], f"{file}: header damaged")
    header = parse(data[8:start], file)
    header.pop("__metadata__", None)
    position = 0
    for name, item in sorted(header.items(), key=lambda pair: pair[1]["data_offsets"]):
        lo, hi = item["data_offsets"]
        size = math.prod(item["shape"]) * np.dtype(TYPES[item["dtype"]]).itemsize
        require(lo == position and hi == lo + size, f"{name}: shape and offsets disagree")
        require(name in manifest["tensors"], f"{name}: not in the manifest")
        array, position = np.ndarray(item["shape"], TYPES[item["dtype"]], data, start + lo), hi
        entry = manifest["tensors"][name]
        check_blocks(name, array.reshape(entry["view"]), entry, manifest["block_bytes"])
        yield name, array
    require(start + position == len(data), f"{file}: another size")


def read_checkpoint(folder):
    """Return the state and all tensors of a checkpoint by name; raise ValueError if anything is damaged."""
    folder = pathlib.Path(folder)
    data = read(folder, "manifest.json")
    digest = xxhash.xxh3_64_hexdigest(data[:-TAIL_BYTES])
    require(data[-TAIL_BYTES:] == f',"xxh3_64":"{digest}"}}\n'.encode(), "manifest.json: damaged")
    manifest = parse(data, "manifest.json")
    require(manifest["format"] == "reprise-manifest/1", f"unknown format {manifest['format']}")
    require(manifest["block_bytes"] == 4194304, f"blocks of {manifest['block_bytes']} bytes")
    tensors, documents = {}, {}
    for name, entry in manifest["files"].items():
        data = read(folder, name)
        require(len(data) == entry["bytes"], f"{name}: another size")
        if "header_xxh3_64" in entry:
            for tensor, array in read_tensors(name, data, entry, manifest):
                require(tensor not in tensors, f"{tensor}: in two files")
                tensors[tensor] = array
        else:
            require(xxhash.xxh3_64_hexdigest(data) == entry["xxh3_64"], f"{name}: damaged")
            documents[name] = data
    require(tensors.keys() == manifest["tensors"].keys(), "headers and manifest name other tensors")
    index = parse(documents.get("model.safetensors.index.json", b'{"weight_map":{}}'), "index")
    for name, file in index["weight_map"].items():
        require(name in tensors and "header_xxh3_64" in manifest["files"].get(file, {}), f"index: {name} in {file}")
    require("trainer_state.json" in documents, "there is no trainer_state.json")
    state = parse(documents["trainer_state.json"], "trainer_state.json")
    require(state["format"] == "reprise/1", f"unknown format {state['format']}")
    tensors |= {alias: tensors[name] for alias, name in manifest["aliases"].items()}
    return state, tensors


if __name__ == "__main__":
    state, tensors = read_checkpoint(sys.argv[1])
    print(f"iteration {state['iteration']}: {len(tensors)} tensors, every digest is right")
