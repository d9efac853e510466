"""Sources of a blend, made on the spot."""

from nemo_prorl.config import DataSource
from nemo_prorl.data.blend import LoadedSource


def loaded(name: str, count: int, weight: float = 1.0) -> LoadedSource:
    records = [
        {"id": f"{name}-{i}", "task": "math", "prompt": f"{name} {i}", "truth": {"answer": str(i)}}
        for i in range(count)
    ]
    return DataSource(name=name, path=f"{name}.jsonl", weight=weight), records


def sources() -> list[LoadedSource]:
    return [loaded("a", 7, 3.0), loaded("b", 5, 1.0), loaded("c", 11, 1.5)]
