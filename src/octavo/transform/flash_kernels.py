"""Attention that a flash kernel computes in place of its equations, where its rule and the device allow it."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from octavo.transform.frame import Frame, Value
from octavo.transform.jaxpr import Jaxpr, equation_context
from octavo.transform.rearrange import as_array
from octavo.transform.resolve import find_site
from octavo.transform.site import Site
from octavo.transform.weights import Origin


class FlashKernels:
    """The attention of one jaxpr, while its equations are evaluated in order."""

    def __init__(self, jaxpr: Jaxpr, keys: Mapping[int, int], frame: Frame):
        # Imported where a rule is for attention only, because Pallas takes half a second.
        from octavo.kernels.flash_attention import missing_device

        self.jaxpr, self.frame = jaxpr, frame
        self.keys = {} if missing_device() else keys
        self.owner: dict[int, Any] = {}
        """The attention that each equation is part of."""
        self.operands: dict[int, list[Any]] = {}
        """Its queries, keys and values so far."""
        self.sites: dict[int, Site] = {}

    def replaces(self, n: int, inputs: list[Value]) -> bool:
        """Whether a kernel computes equation `n`, which has these inputs."""
        if n in self.keys:
            self._choose(n, inputs)
        return n in self.owner

    def _choose(self, n: int, inputs: list[Value]) -> None:
        from octavo.transform.flash import UnsupportedError, config_reason, find_flash

        side, eqn = self.keys[n], self.jaxpr.eqns[n]
        site = find_site(eqn, eqn.invars, inputs, dataclasses.replace(self.frame, counters={}), None, side)
        if site.keys is None:  # no rule for attention
            return
        flash = None
        try:
            flash = find_flash(self.jaxpr, n, side)
            atoms: Any = eqn.invars[1 - side], eqn.invars[side], self.jaxpr.eqns[flash.weighted].invars[flash.value]
            reason = config_reason(site.config) or flash.unsupported([atom.aval for atom in atoms])
        except UnsupportedError as error:
            reason = str(error)
        self.sites[n] = dataclasses.replace(site, flash=reason or "")
        if flash is not None and reason is None and not self.frame.context.init:
            self.owner |= dict.fromkeys(flash.inside, flash)

    def note(self, n: int) -> None:
        """Tell the site of equation `n`, after it was evaluated, whether a kernel computes it."""
        if n in self.sites:
            sites = self.frame.context.sites
            key = next(key for key in reversed(sites) if key[0] == self.sites[n].path)
            sites[key] = dataclasses.replace(sites[key], flash=self.sites[n].flash)

    def run(self, n: int, inputs: list[Value]) -> list[Value]:
        """The results of equation `n`: those of the last one are computed, others are never read."""
        eqn, flash = self.jaxpr.eqns[n], self.owner[n]
        first, last = flash.inside[0], flash.inside[-1]
        if n in (first, flash.weighted):
            site = find_site(eqn, eqn.invars, inputs, self.frame, None, self.keys.get(n))
            self.frame.context.provider._used.add(self.sites[first].rule)
            given = [inputs[1 - self.keys[n]], inputs[self.keys[n]]] if n == first else [inputs[flash.value]]
            self.operands.setdefault(first, []).extend(as_array(value.data) for value in given)
            self.sites[n] = site
        if n != last:
            return [Value(None, Origin()) for _ in eqn.outvars]
        with equation_context(eqn):
            out = flash.run(self.operands[first], eqn.outvars[0].aval)
        return [Value(out, Origin(module=self.sites[flash.weighted].path))]
