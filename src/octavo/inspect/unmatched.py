"""Rules that match nothing, and why."""

from collections.abc import Sequence

from octavo.rules import QuantizationRule, nearest
from octavo.transform.site import Site


def unmatched_rules(sites: Sequence[Site], rules: Sequence[QuantizationRule], strict: bool) -> list[str]:
    """A line for every rule that matches nothing, or only matmuls that earlier rules match."""
    used = {id(site.rule) for site in sites}
    notes = []
    for number, rule in enumerate(rules):
        if id(rule) in used or rule.optional:
            continue
        met = [s for s in sites if _matches(rule, s, strict)]
        names = sorted({name for s in sites for name in (s.candidates[:1] if strict else s.candidates)})
        if met:
            first = met[0].rule
            taken = next(n for n, r in enumerate(rules) if r is first)
            why = f"is shadowed: rule {taken} comes first and takes all {len(met)} matmuls that it matches"
        else:
            near = nearest(rule.module_path, names)
            hint = f"; the nearest paths are {', '.join(map(repr, near))}" if near else ""
            elsewhere = sorted({s.op for s in sites})
            wanted = f" with op_names={rule.op_names} (there are {', '.join(elsewhere)})" if rule.op_names else ""
            why = f"matches nothing: module_path={rule.module_path!r}{wanted}{hint}"
        notes.append(f"rule {number} {why}")
    return notes


def _matches(rule: QuantizationRule, site: Site, strict: bool) -> bool:
    names = site.candidates[:1] if strict else site.candidates
    return any(rule.matches(name, site.op, weights=any(site.weights)) for name in names)
