"""What a quantized checkpoint says of itself, in each file's header and in config.json."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from hadaquant.contract import Contract
from hadaquant.errors import CheckpointError

#: The key of a safetensors header's metadata, and the ``quant_method`` of a config.json.
METADATA_KEY = "hadaquant"

#: Version of the record's own fields. A reader refuses a newer one.
RECORD_VERSION = 1

#: Fields that a record need not have.
_LATER = ("calibration", "source_fingerprint")


@dataclass(frozen=True, kw_only=True)
class CalibrationRecord:
    """What better codes than the nearest, and fitted gains, were made with.

    Attributes:
        method: how weights got their codes, such as ``gptq``; ``rtn`` is the nearest.
        options: of the method, where they are not the defaults.
        text: the calibration text's file name.
        digest: of all of its tokens, as a study has it.
        windows, window: how many windows of how many tokens were read.
        gains: steps that the norms' gains were fitted for.
    """

    method: str
    options: dict[str, Any]
    text: str
    digest: str
    windows: int
    window: int
    gains: int = 0

    def __str__(self) -> str:
        options = "".join(f", {key} {value}" for key, value in self.options.items())
        gains = f", gains fitted for {self.gains} steps" if self.gains else ""
        return f"{self.method}{options}{gains}, on {self.windows} × {self.window} tokens of {self.text} ({self.digest})"


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a model in memory was loaded from; :attr:`KEY` is the model's attribute that holds it.

    Attributes:
        folder: None where it was one file.
        files: of the folder, relative to it, that hold no weights, such as the tokenizer's.
        calibration: what the checkpoint says of its own.
    """

    KEY: ClassVar[str] = "hadaquant_origin"

    folder: Path | None
    files: tuple[Path, ...]
    calibration: CalibrationRecord | None

    def copy_files(self, out: Path) -> None:
        """Copy the files that are still there into a folder, but those that it has."""
        if self.folder is None:
            return
        for path in self.files:
            source, target = self.folder / path, out / path
            if source.is_file() and not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, target)


@dataclass(frozen=True, kw_only=True)
class Record:
    """How a checkpoint, or one file of it, was made.

    Attributes:
        tool: version of hadaquant that wrote it.
        layout: name of the layout, such as ``native``.
        layers: contract of each quantized layer.
        kept: why each other layer was kept.
        tied: names of tensors that are stored under another name.
        source: its absolute path, in files of earlier versions as it was typed; None for a model saved from memory.
        source_fingerprint: of the source's weights; None, and not written, where that is not known.
        format, rotation, skip: what was asked for; None for a model saved from memory.
        calibration: None where codes are the nearest and gains the source's; then it is not written.
    """

    tool: str
    layout: str
    layers: dict[str, Contract]
    kept: dict[str, str] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    source: str | None = None
    source_fingerprint: str | None = None
    format: str | None = None
    rotation: str | None = None
    skip: tuple[str, ...] | None = None
    calibration: CalibrationRecord | None = None
    version: int = RECORD_VERSION

    def of_file(self, layers: set[str], tensors: set[str]) -> Record:
        """The part of it that speaks of one file."""
        return replace(
            self,
            layers={name: c for name, c in self.layers.items() if name in layers},
            kept={name: why for name, why in self.kept.items() if name in tensors or f"{name}.weight" in tensors},
            tied={alias: name for alias, name in self.tied.items() if name in tensors},
        )

    def to_dict(self) -> dict[str, Any]:
        """Fields for JSON."""
        fields = {**asdict(self), "layers": {name: contract.to_dict() for name, contract in self.layers.items()}}
        return {name: value for name, value in fields.items() if value is not None or name not in _LATER}

    def to_json(self) -> str:
        """Compact JSON for a header."""
        return json.dumps(self.to_dict(), ensure_ascii=False, separators=(",", ":"))

    def to_config(self) -> dict[str, Any]:
        """The ``quantization_config`` of a config.json."""
        return {"quant_method": METADATA_KEY, **self.to_dict()}

    @classmethod
    def from_json(cls, text: str, path: Path) -> Record:
        """Inverse of :meth:`to_json`. Raises as :meth:`from_dict`."""
        try:
            fields = json.loads(text)
        except ValueError:
            fields = None
        return cls.from_dict(fields, path)

    @classmethod
    def from_dict(cls, fields: Any, path: Path) -> Record:
        """Inverse of :meth:`to_dict`; ``path`` is where the fields were found.

        Raises:
            CheckpointError: damaged, or of a newer version.
            LayerError: a layer's contract is damaged, or of a newer version.
        """
        damaged = CheckpointError(path=path, rule=f"its {METADATA_KEY!r} record is damaged", fix="write it again")
        if not isinstance(fields, dict) or not isinstance(fields.get("version"), int):
            raise damaged
        if fields["version"] != RECORD_VERSION:
            raise CheckpointError(
                path=path,
                rule=f"written by hadaquant {fields.get('tool')} in version {fields['version']} of the file layout, "
                f"this library reads {RECORD_VERSION}",
                fix="upgrade hadaquant",
            )
        fields = {**dict.fromkeys(_LATER), **fields}
        if set(fields) != set(cls.__dataclass_fields__) or not isinstance(fields["layers"], dict):
            raise damaged
        layers = {name: Contract.from_dict(contract, name) for name, contract in fields["layers"].items()}
        skip, calibration = fields["skip"], fields["calibration"]
        try:
            made = None if calibration is None else CalibrationRecord(**calibration)
        except TypeError as error:
            raise damaged from error
        return cls(**{**fields, "layers": layers, "skip": None if skip is None else tuple(skip), "calibration": made})
