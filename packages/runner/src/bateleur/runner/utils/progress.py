"""A progress bar that an interrupt does not break."""

from typing import Any

from tqdm import tqdm


class ProgressBar(tqdm):  # type: ignore[type-arg]
    """tqdm's bar, but an exception while it prints releases tqdm's lock, which all bars of a process share.

    tqdm itself (4.70) keeps the lock after a Ctrl-C, so that bars of other threads wait forever.
    """

    def refresh(self, nolock: bool = False, lock_args: tuple[Any, ...] | None = None) -> None:
        """Print the bar again. Takes the lock in any case; the thread that has it may take it again."""
        with self.get_lock():  # type: ignore[no-untyped-call]
            if not self.disable:
                self.display()
