"""What a service has been given of a run, in a small file of the run directory, so that nothing is given twice.

It is written before a step is handed over. Where a run is killed in between, the service may lack that step; it never
has one twice. A checkpoint does not hold it: going back to one takes nothing back from a service.
"""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path

from megatron_stare.errors import DataError


@dataclass
class Delivered:
    """id: the run's name in the service, made here. starts: how often the run was opened there.

    step: the newest that was handed over. evaluated: [step, task] of evaluations that were.
    redone: [first, last] of steps that were made again after that, and whose first figures the service has.
    """

    file: Path
    id: str = field(default_factory=lambda: secrets.token_hex(4))
    starts: int = 0
    step: int = 0
    evaluated: list[list[int | str]] = field(default_factory=list)
    redone: list[list[int]] = field(default_factory=list)

    @classmethod
    def read(cls, file: Path) -> Delivered:
        """What is known; nothing was delivered where there is no file.

        Raises:
            DataError: it is damaged.
        """
        try:
            return cls(file, **json.loads(file.read_text()))
        except FileNotFoundError:
            return cls(file)
        except (OSError, ValueError, TypeError) as error:
            raise DataError(
                f"not what a service was given of a run: {error}",
                where=str(file),
                fix="remove it, and the service is given the whole run anew, under another name",
            ) from error

    def write(self) -> None:
        """Raises OSError."""
        told = {each.name: getattr(self, each.name) for each in dataclasses.fields(self) if each.name != "file"}
        temporary = self.file.with_name(f".{self.file.name}.{os.getpid()}.tmp")
        temporary.write_text(json.dumps(told))
        os.replace(temporary, self.file)

    def goes_on_after(self, step: int) -> None:
        """The run is continued after this step: later ones that were delivered are made again."""
        if step < self.step and [step + 1, self.step] not in self.redone:
            self.redone.append([step + 1, self.step])
