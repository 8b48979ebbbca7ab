"""Draws Trainers, and what scripts do with them: see trainer_pair.py."""

from hypothesis import strategies as st
from store_programs import draw

MULTIPLIERS = st.sampled_from([1.0, 1.0, 0.5, 2.0])
BATCHES = st.sampled_from([1, 2, 4, 8])


@st.composite
def parameters(draw_one, lazy):
    kinds = ["dense", "dense", "table", "sparse"] if lazy else ["dense"]
    kind = draw_one(st.sampled_from(kinds))
    of_rows = kind != "dense"
    return {
        "kind": kind,
        "shape": draw_one(st.sampled_from([[6, 1], [7, 4], [30, 2]]) if of_rows else draw.SHAPES),
        "dtype": "float32" if of_rows else draw_one(draw.TYPES),
        "grad_req": "write" if of_rows else draw_one(st.sampled_from(["write", "write", "add"])),
        "lr_mult": draw_one(MULTIPLIERS),
        "wd_mult": draw_one(MULTIPLIERS),
    }


@st.composite
def trainers(draw_one):
    lazy = draw_one(st.booleans())
    spec = {
        "api": "trainer",
        "parameters": draw_one(st.lists(parameters(lazy), min_size=1, max_size=3)),
        "contexts": draw_one(st.integers(1, 2)),
        "reduction": draw_one(st.sampled_from([None, "sum", "average"])),
        "compression": draw_one(st.sampled_from([None, None, None, "fp16"])),
        "update_on_kvstore": draw_one(st.sampled_from([None, True, False])),
        "first_weights_differ": draw_one(st.booleans()),
        "lazy": lazy,
    }
    spec["optimizer"] = draw_one(draw.optimizers(spec))
    if has_sparse(spec):
        spec["update_on_kvstore"] = None  # MXNet allows nothing else
    if spec["optimizer"]["name"] == "nadam" and spec["update_on_kvstore"] is False:
        spec["contexts"] = 1  # several of MXNet's updaters share the schedule of its momentum
    return spec


def has_sparse(spec):
    return any(parameter["kind"] == "sparse" for parameter in spec["parameters"])


@st.composite
def operations(draw_one, spec, saved):
    one = st.integers(0, len(spec["parameters"]) - 1)
    do = draw_one(st.sampled_from(OPERATIONS))
    if do == "step":
        return {"do": do, **draw_one(steps())}
    if do == "split":
        return {"do": do, **draw_one(steps()), "scale": draw_one(st.sampled_from([1.0, 0.5]))}
    if do == "tune":
        operation = draw_one(draw.tunings(one))
        return {"do": do, **operation, **({"field": "lr"} if operation["field"] == "rescale_grad" else {})}
    if do == "set_data":
        return {"do": do, "key": draw_one(one), "seed": draw_one(draw.SEEDS), "differs": draw_one(st.booleans())}
    if do in ("save", "load"):
        return draw_one(draw.files(do, saved))
    if do in ("save_parameters", "load_parameters"):
        return {"do": do, "slot": draw_one(st.integers(0, 1))}
    if do == "row_sparse_data":
        return {"do": do, "key": draw_one(one), "rows": draw_one(st.lists(st.integers(0, 29), min_size=1, max_size=5))}
    if do == "join":
        return {"do": do, "rounds": draw_one(st.lists(st.integers(0, 3), min_size=3, max_size=3)), **draw_one(steps())}
    return {"do": do}


@st.composite
def steps(draw_one):
    return {
        "seed": draw_one(draw.SEEDS),
        "rows": draw_one(st.lists(st.integers(0, 29), min_size=1, max_size=5)),
        "batch": draw_one(BATCHES),
        "passes": draw_one(st.integers(1, 2)),
        "zero": draw_one(st.booleans()),
    }


OPERATIONS = (
    ["step"] * 8 + ["split"] * 4 + ["tune"] * 3 + ["set_data"] * 2 + ["save", "load"] * 2
    + ["save_parameters", "load_parameters", "row_sparse_data", "row_sparse_data", "join"]
)  # fmt: skip
