"""What can be chosen for a key, a store or a job, as far as it matters for what goes together (combinations.py).

A choice is a value of one of the axes of a key's plan (AXES), or a feature of the job, of a front end, or of a script
that does not go with all of those. Pure values; the core is imported only where a compression has to be looked at.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, List, Mapping, Optional, Union

from p3 import codecs
from p3.plan.key_plan import KeyPlan
from p3.plan.strategy import AUTO, Strategy


@dataclass(frozen=True)
class Choice:
    words: str
    asked_by: str = ""  # in the documentation: how a script or a job asks for it
    detail: str = dataclasses.field(default="", compare=False)  # what it is in this case

    def said(self, detail: str) -> Choice:
        """The same, of which an error says more."""
        return dataclasses.replace(self, detail=detail)

    def __str__(self) -> str:
        return "%s (%s)" % (self.words, self.detail) if self.detail else self.words


# The axes of a key.

SYNCHRONOUS = Choice("common rounds", "`p3_sync`")
STALE = Choice("staleness", "`p3_ssp`, `p3_async`, `staleness=`")

PLAIN = Choice("gradients as they are")
ENCODED = Choice("compression", "[any type but dgc and lowrank](compression.md)")
DGC = Choice("dgc", '`{"type": "dgc"}`')

WHOLE_BACK = Choice("values that come back whole")
ENCODED_BACK = Choice(
    "compression of what comes back",
    '`compression="int8"` or `{"down": ...}`, [any type but dgc and lowrank](compression.md#both-ways)',
)

DENSE = Choice("dense gradients")
ROWS = Choice("rows", "[row_sparse gradients](sparse.md), `nn.Embedding(sparse=True)`")
FACTORS = Choice("factors", "`p3.factors`, `p3.torch.factors`")

SUM = Choice("sums")
AVERAGE = Choice("averages", '`set_reduction("average")`')
MEAN = Choice("means over all workers", "PyTorch, where the workers update")
NORM = Choice("the norm of a store's sums", "PyTorch, `max_grad_norm`; MXNet, `set_clipping`")

BY_SERVERS = Choice("an update by the servers")
BY_STEPS = Choice("steps that the workers make")
BY_WORKERS = Choice("an update by each worker")

SGD = Choice("plain SGD on the servers", "with momentum or without")
OTHER_RULE = Choice("another optimizer on the servers", "Adam, SGD with Nesterov's momentum ...")
NO_RULE = Choice(
    "sums handed to the workers",
    "no optimizer, one that the servers lack, `update_on_kvstore=False`, `synchronous=True`, `max_grad_norm`",
)

AXES = {
    "discipline": (SYNCHRONOUS, STALE),
    "codec": (PLAIN, ENCODED, DGC),
    "value codec": (WHOLE_BACK, ENCODED_BACK),
    "cut": (DENSE, ROWS, FACTORS),
    "reduction": (SUM, AVERAGE, MEAN, NORM),
    "update": (BY_SERVERS, BY_STEPS, BY_WORKERS),
    "rule": (SGD, OTHER_RULE, NO_RULE),
}

# And what matters beside them: of the key,

LOW_RANK = Choice("lowrank", '`{"type": "lowrank"}`')  # two thin matrices have rounds in its place, as plain keys
NOT_FLOAT32 = Choice("a type other than float32")
WHOLE_NUMBERS = Choice("a type of whole numbers")
VECTOR = Choice("a key of one dimension", "a bias, a scale")

# of the job,

SNAPSHOTS = Choice("snapshots", "`P3_SNAPSHOT_DIR`", "P3_SNAPSHOT_DIR is set")
LEAVING = Choice("going on without lost workers", "`P3_ON_WORKER_LOSS=continue`", "P3_ON_WORKER_LOSS=continue is set")
ENTERING = Choice("processes that join", "`p3 join`, `p3 run --rejoin`, `P3_MAX_WORKERS`")
HEIRS = Choice("going on without lost servers", "`P3_ON_SERVER_LOSS=continue`", "P3_ON_SERVER_LOSS=continue is set")
REPLICAS = Choice("an optimizer of the servers where they may be lost",
                  "`P3_ON_SERVER_LOSS=continue`; each worker updates", "P3_ON_SERVER_LOSS=continue is set")  # fmt: skip
AGGREGATION = Choice("local aggregation", "`P3_LOCAL_AGGREGATION=1`", "P3_LOCAL_AGGREGATION")
GROUPS = Choice("aggregation in groups", "`P3_GROUPS`", "P3_GROUPS")
CHECK = Choice("P3_CHECK", "in PyTorch")

# of the front end and of the script.

MXNET = Choice("a store of MXNet")
BY_MODULE = Choice("updates by Module itself", "`MXNET_UPDATE_ON_KVSTORE=0`", "MXNET_UPDATE_ON_KVSTORE=0 is set")
GPU = Choice("parameters on a GPU", "in PyTorch")
SCALER = Choice("a loss scaler", "AMP in MXNet")
CLIPPING = Choice("clipping by the norm that the servers tell", "`store.set_clipping()` in MXNet")
NAMED_SCALER = Choice("grad_scaler", "`DistributedOptimizer(grad_scaler=...)`")
UNAWAITED = Choice("steps that do not wait for the mean gradients", "in PyTorch, without `synchronous=True`")
UNNAMED_SCALER = Choice("a GradScaler that DistributedOptimizer does not know", "in PyTorch")
LATE_SCALER = Choice("p3.torch.GradScaler", "in PyTorch, without `synchronous=True`")
RESIDUAL = Choice("compression that keeps what it leaves out", "[the types](compression.md) with error feedback")
RESIDUAL_BACK = Choice("compression of what comes back that keeps what it leaves out",
                       "[the types](compression.md) with error feedback")  # fmt: skip
STATE_FILES = Choice("files of an optimizer's states", "`save_states`, `load_states`")
STEPS_TAKEN = Choice("an optimizer that has taken steps", "in PyTorch")
MOVING = Choice("other partitions while a job trains", "`Session.repartition`")
RECUT = Choice("another strategy while a job trains",
               '`strategy="auto"`, `P3_STRATEGY=auto`, `optimizer.change_strategy()`')  # fmt: skip
ADDED_UP = Choice("gradients of several backward passes", "`no_sync()`, no `zero_grad()`")
JOIN = Choice("join()", "`optimizer.join()`")
SHOWN_MEANS = Choice("mean gradients that the script sees before step()",
                     "`optimizer.synchronize()` or `clip_grad_norm_()` between `backward()` and `step()`")  # fmt: skip
LEFT_OUT = Choice("a step that is left out", "`zero_grad()` in the place of `step()`, in a trainer's loop")
PLANNED = Choice("what a strategy chooses beside servers and slices",
                 '`"codec"`, `"route": "factors"`, `"staleness"` in [a strategy](planning.md#the-file)')  # fmt: skip
WEIGHTS = Choice("weights of workers", "`optimizer.weigh()`")
WEIGHTS_OF_ENDED = Choice("weights where workers have ended", "`optimizer.weigh()`, and `optimizer.join()` later")
INDEPENDENT = Choice("an optimizer that is said to update each parameter by itself",
                     "`DistributedOptimizer(independent=True)`")  # fmt: skip
AWAITED = Choice("updates of all parameters in step()", "`DistributedOptimizer(synchronous=True)`")
JOINT = Choice("an update that looks at all parameters", "torch.optim.LBFGS")
LOCAL_STEPS = Choice("local steps", "[`p3.torch.LocalSteps`, `p3.mxnet.LocalSteps`, `p3.LocalSteps`](local-steps.md)")
QUORUM = Choice("a quorum", "[`LocalSteps(quorum=...)`](local-steps.md#unlike-speeds-quorum-and-grace)")
SITES = Choice("a site of several processes", "[`p3.torch.site`](local-steps.md#sites)")
GRADIENTS = Choice("gradients that all workers share", "`DistributedOptimizer`")
CLIPPED = Choice("clipping of the mean gradients", "`DistributedOptimizer(max_grad_norm=...)`")
TRAINERS = Choice("a trainer's loop", "`p3.transformers`, `p3.accelerate`, `p3.lightning`")
CLOSURE = Choice("steps with a closure", "`optimizer.step(closure)`")


# What the values of P3's own settings and messages choose


def of_staleness(rounds: Union[int, float]) -> Choice:
    return STALE if rounds > 0 else SYNCHRONOUS


def of_compression(compression: Optional[Mapping[str, Any]]) -> Choice:
    """An option of a store; None or {}: none."""
    codec = codecs.of(compression)
    if codec is None:
        return PLAIN
    if codec.is_of_matrices:
        return LOW_RANK
    return DGC if codec.makes_steps else ENCODED.said(codec.name)


def of_value_compression(compression: Optional[Mapping[str, Any]]) -> Choice:
    """The option of a store for what comes back; None or {}: none."""
    codec = codecs.of(compression)
    return WHOLE_BACK if codec is None else ENCODED_BACK.said(codec.name)


def of_sums_back(compression: Optional[Mapping[str, Any]]) -> List[Choice]:
    """The same, of sums that the workers apply: whether the servers keep what it leaves out."""
    codec = codecs.of(compression)
    return [] if codec is None or codec.residuals == 0 else [RESIDUAL_BACK.said(codec.name)]


def of_reduction(reduction: Optional[Mapping[str, Any]]) -> Choice:
    """An option of a store, or of a plan; None or {}: sums."""
    return {"sum": SUM, "average": AVERAGE, "mean": MEAN, "norm": NORM}[(reduction or {"type": "sum"})["type"]]


def no_optimizer(why: str) -> Choice:
    """Of a store for which the servers have none."""
    return NO_RULE.said(why)


def of_optimizer(description: Optional[Mapping[str, Any]]) -> Choice:
    """An option of a store (p3/plan/optimizers.py); None or {}: it has none."""
    if not description:
        return no_optimizer("no optimizer is set on the servers")
    name = description["name"]
    if name not in ("sgd", "torch_sgd"):
        return OTHER_RULE.said(name)
    for field, plain in (("nesterov", False), ("dampening", 0), ("maximize", False)):
        if description.get(field, plain) != plain:
            return OTHER_RULE.said("SGD with %s=%r" % (field, description[field]))
    clips = description.get("clip_gradient", -1) >= 0
    return OTHER_RULE.said("SGD with clip_gradient=%r" % description["clip_gradient"]) if clips else SGD


def of_type(dtype: str) -> List[Choice]:
    if dtype == "float32":
        return []
    is_float = dtype.startswith(("float", "bfloat"))
    return [NOT_FLOAT32.said(dtype), *([] if is_float else [WHOLE_NUMBERS.said(dtype)])]


def of_key(
    dtype: str, sparse: bool, gathered: bool, staleness: Union[int, float], norm: bool = False, quorum: int = 0
) -> List[Choice]:
    """Of what a script says of a key itself; the rest follows from its store."""
    content = [] if norm else of_type(dtype)  # of norms the type is not the script's choice
    discipline = of_quorum(quorum) or [of_staleness(staleness)]
    return [*discipline, *[ROWS] * sparse, *[FACTORS] * gathered, *[NORM] * norm, *content]


def of_losses(on_worker_loss: str) -> List[Choice]:
    """P3_ON_WORKER_LOSS."""
    return {"fail": [], "continue": [LEAVING]}[on_worker_loss]


def of_server_losses(on_server_loss: str) -> List[Choice]:
    """P3_ON_SERVER_LOSS."""
    return {"fail": [], "continue": [HEIRS]}[on_server_loss]


def of_strategy(path: Optional[str]) -> List[Choice]:
    """P3_STRATEGY."""
    return [RECUT.said("P3_STRATEGY=auto is set")] if path == AUTO else []


def of_entries(strategy: Strategy) -> List[Choice]:
    """What a strategy chooses beside how keys are cut, for one key or for all."""
    cuts = (strategy.default, *strategy.keys.values())
    fields = ["codec"] * any(cut.codec not in (None, codecs.Ways()) for cut in cuts)
    fields += ["route"] * any(cut.route == "factors" for cut in cuts)
    fields += ["staleness"] * any(cut.staleness for cut in cuts)
    return [PLANNED.said("%s of %s" % (field, strategy.path)) for field in fields[:1]]


def of_quorum(least: Any) -> List[Choice]:
    """LocalSteps(quorum=...), whether that makes sense or not; 0 or None: there is none."""
    return [QUORUM.said("quorum=%.100r" % (least,))] if least else []


def of_job(takes_snapshots: bool, on_worker_loss: str, on_server_loss: str = "fail") -> List[Choice]:
    return [*[SNAPSHOTS] * takes_snapshots, *of_losses(on_worker_loss), *of_server_losses(on_server_loss)]


def of_plan(plan: KeyPlan) -> List[Choice]:
    is_sparse, is_gathered = plan.row_elements > 0, plan.parts > 0
    update = dict(servers=BY_SERVERS, steps=BY_STEPS, workers=BY_WORKERS)[plan.update]
    kind = of_key(plan.dtype, is_sparse, is_gathered, plan.staleness, plan.reduction == "norm", plan.quorum)
    if not is_sparse and not is_gathered:
        kind.append(DENSE)
    codecs_of_it = of_compression(plan.codec), of_value_compression(plan.value_codec)
    return [*kind, *codecs_of_it, of_reduction({"type": plan.reduction}), update]
