"""Faults for `scripts.measure.mutations`: what each replaces, and the test that must notice."""

from typing import NamedTuple


class Fault(NamedTuple):
    """A small mistake that someone could make.

    Attributes:
        file: where, from the root of the checkout.
        what: the mistake, in a few words.
        before: text that stands in the file once.
        after: what takes its place.
        test: a test, or several in one file, as pytest takes them; one must fail.
    """

    file: str
    what: str
    before: str
    after: str
    test: str


FAULTS: tuple[Fault, ...] = ()
