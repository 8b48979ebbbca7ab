"""Draws programs: what stores and Trainers a script has, and what it does with them, in order.

{"stores": [...], "operations": [...]}; see store_pair.py and trainer_pair.py for what each may hold.
"""

from hypothesis import strategies as st

SEEDS = st.integers(0, 99)
RATES = st.sampled_from([0.5, 0.25, 0.125, 0.0625])
RATE = {"learning_rate": RATES}
DECAY = st.sampled_from([0.0, 0.0, 0.125])
MOMENTUM = st.sampled_from([0.0, 0.5, 0.9])
# Those that servers run, and lamb, which each worker runs.
OPTIMIZERS = {
    "sgd": {"momentum": MOMENTUM, "lazy_update": st.booleans()},
    "nag": {"momentum": MOMENTUM},
    "adam": {"beta1": st.sampled_from([0.9, 0.5]), "lazy_update": st.booleans()},
    "adagrad": {},
    "rmsprop": {"centered": st.booleans()},
    "signum": {"momentum": st.sampled_from([0.5, 0.9])},
    "ftml": {},
    "ftrl": {"lamda1": st.sampled_from([0.0, 0.125])},
    "adadelta": {},
    "adamax": {},
    "nadam": {},
    "dcasgd": {},
    "lamb": {},
}


LAZY = ["sgd", "adam", "adagrad"]  # update touched rows alone
FOR_FLOAT64 = ["sgd", "nag", "adam", "signum", "lamb"]  # others of MXNet's make float32 states, and then fail


@st.composite
def optimizers(draw, spec):
    """For a store or Trainer of that spec."""
    arrays = spec["keys" if spec["api"] == "store" else "parameters"]
    lazy = spec["lazy"]
    names = LAZY if lazy else list(OPTIMIZERS)
    if any(array["dtype"] == "float64" for array in arrays):
        names = [name for name in names if name in FOR_FLOAT64]
    name = draw(st.sampled_from(names))
    settings = {field: draw(values) for field, values in OPTIMIZERS[name].items()}
    settings["learning_rate"] = draw(RATES)
    settings["clip_gradient"] = draw(st.sampled_from([None, None, 0.5]))
    if name != "adagrad":  # MXNet's knows no decay for row_sparse gradients
        settings["wd"] = draw(DECAY)
    if lazy and "lazy_update" in settings:
        settings["lazy_update"] = True
    if draw(st.integers(0, 4)) == 4:
        settings["halved_every"] = draw(st.integers(1, 3))  # updates, by a scheduler of the learning rate
    return {"name": name, **settings}


SHAPES = st.sampled_from([[1], [3], [20], [2, 3], [6, 1], [7, 4], [30, 2], [3, 2, 2]])
TABLES = st.sampled_from([[2, 3], [6, 1], [7, 4], [30, 2], [3, 2, 2]])
TYPES = st.sampled_from(["float32", "float32", "float32", "float16", "float64"])
ROWS = st.lists(st.integers(0, 29), max_size=5)
NAMES = st.lists(st.sampled_from([3, "3", 10, "w", "b"]), min_size=1, max_size=3, unique=True)


@st.composite
def keys(draw, name):
    kind = draw(st.sampled_from(["dense", "dense", "table", "sparse"]))  # sparse: a row_sparse weight
    if kind == "dense":
        return {"name": name, "shape": draw(SHAPES), "dtype": draw(TYPES), "kind": kind}
    return {"name": name, "shape": draw(TABLES), "dtype": "float32", "kind": kind}


@st.composite
def stores(draw):
    return {
        "api": "store",
        "keys": [draw(keys(name)) for name in draw(NAMES)],
        "contexts": draw(st.integers(1, 2)),
        "reduction": draw(st.sampled_from([None, "sum", "average"])),
        "compression": draw(st.sampled_from([None, None, None, "fp16"])),
        "lazy": draw(st.booleans()),  # its optimizers update touched rows alone
    }


@st.composite
def store_operations(draw, store, saved):
    """One of the operations of a store with those keys."""
    some = st.lists(st.integers(0, len(store["keys"]) - 1), min_size=1, max_size=3)
    one = st.integers(0, len(store["keys"]) - 1)
    do = draw(st.sampled_from(STORE_OPERATIONS))
    if do in ("push", "pushpull"):
        return {"do": do, "keys": draw(some), "seed": draw(SEEDS), "rows": draw(st.none() | ROWS),
                "priority": draw(st.integers(-2, 2)), "scribble": draw(st.booleans()),
                **({"in_place": draw(st.booleans())} if do == "pushpull" else {})}  # fmt: skip
    if do in ("init", "broadcast"):
        return {"do": do, "keys": draw(st.lists(one, min_size=1, max_size=3, unique=True)), "seed": draw(SEEDS)}
    if do == "pull":
        return {"do": do, "keys": draw(some), "dtype": draw(st.sampled_from([None, "float64", "float16"]))}
    if do == "row_sparse_pull":
        return {"do": do, "key": draw(one), "rows": draw(ROWS)}
    if do == "set_optimizer":
        return {"do": do, "optimizer": draw(optimizers(store))}
    if do == "tune":
        return {"do": do, **draw(tunings(one))}
    if do in ("save", "load"):
        return draw(files(do, saved))
    if do == "join":
        return {"do": do, "rounds": draw(st.lists(st.integers(0, 3), min_size=3, max_size=3)), "seed": draw(SEEDS)}
    if do == "wrong":
        return {"do": do, "what": draw(st.sampled_from(WRONG)), "key": draw(one)}
    return {"do": do}


STORE_OPERATIONS = (
    ["push"] * 5 + ["pushpull"] * 4 + ["pull"] * 2 + ["row_sparse_pull"] * 2 + ["tune"] * 3 + ["save", "load"] * 2
    + ["init", "broadcast", "set_optimizer", "join", "wrong", "look"]
)  # fmt: skip
WRONG = [
    "unknown key", "another shape", "another type", "two first values", "row out of range", "dense rows",
    "late reduction", "late compression", "float key", "missing file", "cut file",
]  # fmt: skip


@st.composite
def files(draw, do, saved):
    """`saved`: the slots that were saved to; another is empty."""
    if do == "load":
        slots = sorted(saved) if saved and draw(st.integers(0, 9)) else [0, 1, 2]
        return {"do": do, "slot": draw(st.sampled_from(slots))}
    slot = draw(st.integers(0, 2))
    saved.add(slot)
    return {"do": do, "slot": slot, "dump": draw(st.booleans())}


@st.composite
def tunings(draw, one):
    field = draw(st.sampled_from(["lr", "lr", "wd", "rescale_grad", "lr_mult", "wd_mult"]))
    values = {"lr": RATES, "wd": DECAY, "rescale_grad": st.sampled_from([1.0, 0.5, 0.25])}
    value = draw(values.get(field, st.sampled_from([0.0, 0.5, 1.0, 2.0])))
    return {"field": field, "key": draw(one), "value": value}


@st.composite
def programs(draw, apis=("store", "trainer"), most_operations=14):
    from store_programs import draw_trainers

    made = {"store": stores(), "trainer": draw_trainers.trainers()}
    chosen = draw(st.lists(st.sampled_from(apis), min_size=1, max_size=2))
    specs = [draw(made[api]) for api in chosen]
    operations, saved = [], set()
    for number, spec in enumerate(specs):
        if spec["api"] == "store" and draw(st.integers(0, 9)) < 9:
            if draw(st.integers(0, 3)):
                operations.append({"store": number, "do": "set_optimizer", "optimizer": draw(optimizers(spec))})
            every = list(range(len(spec["keys"])))
            operations.append({"store": number, "do": "init", "keys": every, "seed": draw(SEEDS)})
    for _ in range(draw(st.integers(1, most_operations))):
        number = draw(st.integers(0, len(specs) - 1))
        spec = specs[number]
        strategy = store_operations(spec, saved) if spec["api"] == "store" else draw_trainers.operations(spec, saved)
        operations.append({"store": number, **draw(strategy)})
    return {"looks": draw(st.booleans()), "stores": specs, "operations": operations}
