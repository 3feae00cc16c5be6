"""Plain NumPy forms of the algorithms, as their papers have them."""

import numpy as np


def round_int(x, scale, zero=0.0, bits=4):
    """Values of a signed integer grid."""
    codes = np.clip(np.round(x / scale) + zero, -(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return (codes - zero) * scale


def gptq(w, hessian, scale, *, bits=4, damping=0.01, order=True, drift=None, strength=0.25):
    """GPTQ in float64, input by input, with the inverse computed as such. `w` and `scale` are [inputs, outputs].

    With `drift`, E (x_f - x) x^T, it is GPTAQ.
    """
    w, h, scale = (np.array(x, np.float64) for x in (w, hessian, scale))
    dead = np.diag(h) == 0
    w[dead] = 0
    h[dead, dead] = 1
    h += damping * np.mean(np.diag(hessian)) * np.diag(~dead)
    perm = np.argsort(-np.diag(hessian), kind="stable") if order else np.arange(len(w))
    w, h, scale = w[perm], h[np.ix_(perm, perm)], scale[perm]
    upper = np.linalg.cholesky(np.linalg.inv(h)).T
    out, moved = np.zeros_like(w), np.zeros_like(h)
    if drift is not None:
        moved = strength * np.triu(drift[np.ix_(perm, perm)] @ upper.T, 1) @ upper
    for j in range(len(w)):
        out[j] = round_int(w[j], scale[j], bits=bits)
        w[j + 1 :] -= np.outer(upper[j, j + 1 :], (w[j] - out[j]) / upper[j, j]) - np.outer(moved[j, j + 1 :], w[j])
    return out[np.argsort(perm)]


def search(w, h, factors, *, group, bits=4):
    """The scale of each group of inputs with the least weighted error. `w` is [inputs, outputs], `h` [inputs]."""
    scales = np.zeros((len(w) // group, w.shape[1]))
    for g in range(len(w) // group):
        own, weight = w[g * group : (g + 1) * group], h[g * group : (g + 1) * group, None]
        start = np.abs(own).max(axis=0) / (2 ** (bits - 1) - 0.5)
        tried = [start * f for f in factors]
        tried += [-s for s in tried]
        errors = [np.sum(weight * (round_int(own, s, bits=bits) - own) ** 2, axis=0) for s in tried]
        scales[g] = np.array(tried)[np.argmin(errors, axis=0), np.arange(w.shape[1])]
    return scales


def loss(error, hessian):
    """The mean squared change of the outputs."""
    return float(np.sum((np.asarray(hessian, np.float64) @ error) * error))
