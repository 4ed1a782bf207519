"""Errors that the command line reports in one sentence, without a traceback."""


class LabError(Exception):
    """An error whose message tells a user what was wrong and what to do."""


class ConfigError(LabError):
    """An option has an invalid value, or a task or an optimizer does not exist."""


class DataError(LabError):
    """A data file is missing, truncated or not in its owner's format."""


class CheckpointError(LabError):
    """A checkpoint cannot be read or belongs to another run."""


class RunExistsError(LabError):
    """A run of this name exists, or another process is writing it."""


class RunFileError(LabError):
    """A file is not a run or benchmark file of this laboratory, or is damaged."""


class StoppedError(Exception):
    """A run was stopped and has written its checkpoint: as ``planned`` by --stop-after-..., or by a signal."""

    def __init__(self, message: str, *, planned: bool) -> None:
        super().__init__(message)
        self.planned = planned
