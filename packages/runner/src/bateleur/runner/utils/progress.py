"""A progress bar that an interrupt does not break."""

from typing import Any

from tqdm import tqdm


class ProgressBar(tqdm):  # type: ignore[type-arg]
    """tqdm's bar, but an exception while it prints releases tqdm's lock, which all bars of a process share.

    tqdm 4.67 keeps the lock, so that bars of other threads wait forever after a Ctrl-C.
    """

    def refresh(self, nolock: bool = False, lock_args: tuple[Any, ...] | None = None) -> None:
        """Print the bar again. Takes the lock in any case; the thread that has it may take it again."""
        with self.get_lock():  # type: ignore[no-untyped-call]
            self.display()
