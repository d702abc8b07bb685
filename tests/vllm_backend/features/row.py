"""One row of the features that a user may combine with SPARSEK."""

from __future__ import annotations

from dataclasses import dataclass

SERVED, REFUSED = "served", "refused"


@dataclass(frozen=True)
class Row:
    """One feature.

    Args:
        feature: as users name it: a kind of model, an option, a field of a request.
        outcome: ``SERVED`` or ``REFUSED``.
        proofs: tests below ``tests/vllm_backend``, as pytest names them; without the brackets, all
            parameters of a test.
        note: the limit, or what to do instead.
    """

    feature: str
    outcome: str
    proofs: tuple[str, ...]
    note: str = ""

    @property
    def where(self) -> str:
        """On which machines the proofs run, by the names of their files."""
        on_gpu = {"gpu" in proof.partition("::")[0] for proof in self.proofs}
        return " and ".join(
            [name for name, found in (("CPU", False), ("GPU", True)) if found in on_gpu]
        )


def served(feature: str, *proofs: str, note: str = "") -> Row:
    """The row of a feature that is served."""
    return Row(feature, SERVED, proofs, note)


def refused(feature: str, *proofs: str, note: str) -> Row:
    """The row of a feature that stops the start."""
    return Row(feature, REFUSED, proofs, note)
