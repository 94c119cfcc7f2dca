"""Alternating rounds and what is made of them."""

import statistics

from .contender import ContenderError


def alternate(entries, n_rounds, on_round):
    """Measures every entry once per round; returns {key: [answer of round 0, ...]}.

    entries: {key: callable that measures once and returns the answer}. Each round begins with the next entry, so
    that none always runs first. An entry that fails is left out from then on; its words are in the second result.
    """
    answers = {key: [] for key in entries}
    failures = {}
    keys = list(entries)
    for n in range(n_rounds):
        shift = n % len(keys)
        for key in keys[shift:] + keys[:shift]:
            if key in failures:
                continue
            try:
                answers[key].append(entries[key]())
            except ContenderError as error:
                failures[key] = str(error)
                answers[key] = []
        on_round(n)
    return answers, failures


def median_of(answers, field="us"):
    """Median over the rounds, or None where nothing was measured."""
    return statistics.median(a[field] for a in answers) if answers else None


def ratio(ours, theirs, field="us"):
    """Median of the per-round ratios ours/theirs with (smallest, largest); None where one of the two is missing."""
    if not ours or not theirs or len(ours) != len(theirs):
        return None, None
    each = [a[field] / b[field] for a, b in zip(ours, theirs)]
    return statistics.median(each), [min(each), max(each)]


def compare(record, ours, others):
    """Adds to the record: a number per contender, the ratio of ours to each other one, its spread, and the rounds."""
    record["lockstep"] = round_number(median_of(ours))
    record["rounds"] = {"lockstep": [round_number(a["us"]) for a in ours]}
    for name, answers in others.items():
        record[name] = round_number(median_of(answers))
        record["rounds"][name] = [round_number(a["us"]) for a in answers]
    for name, answers in others.items():
        middle, spread = ratio(ours, answers)
        if middle is not None:
            record[f"ratio_{name}"] = round_number(middle)
            record[f"ratio_{name}_spread"] = [round_number(x) for x in spread]
    return record


def round_number(value):
    """Four significant digits: more would pretend."""
    return None if value is None else float(f"{value:.4g}")
