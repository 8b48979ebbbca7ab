"""What goes together: the one table of which choices exclude each other, why, and what to do instead.

    python -m p3.plan.combinations                # prints the tables of docs/strategies.md

Two choices (choices.py) go together unless EXCLUSIONS says that they do not; then one of them gives way by itself, or
they are refused, with the text that is made here. Whoever refuses asks: front ends, sessions, the scheduler when a key
is announced, servers when they define it. Pure data and pure functions.
"""

from __future__ import annotations

from typing import Iterator, NamedTuple, Optional, Tuple

from p3.plan.choices import (
    ADDED_UP, AGGREGATION, AVERAGE, AWAITED, BY_MODULE, BY_SERVERS, BY_STEPS, BY_WORKERS, CHECK, CLIPPED, CLIPPING,
    CLOSURE, Choice, DENSE, DGC, ENCODED, ENCODED_BACK, ENTERING, FACTORS, GPU, GRADIENTS, GROUPS, HEIRS, INDEPENDENT,
    JOIN, JOINT, LATE_SCALER, LEAVING, LEFT_OUT, LOCAL_STEPS, LOW_RANK, MEAN, MOVING, MXNET, NAMED_SCALER, NORM,
    NOT_FLOAT32, NO_RULE, OTHER_RULE, PLAIN, PLANNED, QUORUM, RECUT, REPLICAS, RESIDUAL, RESIDUAL_BACK, ROWS, SCALER,
    SGD, SHOWN_MEANS, SITES, SNAPSHOTS, STALE, STATE_FILES, STEPS_TAKEN, TRAINERS, UNAWAITED, UNNAMED_SCALER, VECTOR,
    WEIGHTS, WEIGHTS_OF_ENDED, WHOLE_NUMBERS, of_plan,
)  # fmt: skip
from p3.plan.key_plan import KeyPlan


class Exclusion(NamedTuple):
    """Of one choice and each of some others."""

    choice: Choice
    others: Tuple[Choice, ...]
    why: str
    instead: str  # what to do, or what is done
    yields: bool = False  # what comes first gives way by itself; else they are refused

    def text(self, choice: Choice, other: Choice) -> str:
        return "%s and %s exclude each other: %s. %s" % (choice, other, self.why, self.instead)


def _gives_way(choice: Choice, others: Tuple[Choice, ...], why: str, instead: str) -> Exclusion:
    return Exclusion(choice, others, why, instead, yields=True)


_RULES = (SGD, OTHER_RULE)
_NO_COMMON_STATE = "workers that are rounds apart have no state in common"
_WEIGHT_ELSEWHERE = "every worker updates the weight from factors, so the servers do not have it"
_LEAVE_OUT = "leave the layer out of p3.factors or p3.torch.factors"
_NO_SUCH_PLAN = "no script can ask for it, so nodes of different versions have met"
_SAME_VERSION = "Run the same version of P3 on all nodes"

EXCLUSIONS: Tuple[Exclusion, ...] = (
    Exclusion(STALE, (DGC,), "dgc sums what all workers send in a round, and there is no such round",
              "Use another compression, or set staleness to 0"),
    Exclusion(STALE, (FACTORS,), "factors are summed in common rounds, and with staleness there are none",
              "Set staleness to 0, or %s" % _LEAVE_OUT),
    Exclusion(STALE, (NO_RULE,), "the servers update at each push, so there is no round whose sum a worker could get",
              "Set an optimizer that the servers know before the first push, in PyTorch without synchronous=True and "
              "max_grad_norm; or set staleness to 0"),
    Exclusion(STALE, (SNAPSHOTS,), "%s that a snapshot could be of" % _NO_COMMON_STATE,
              "Unset P3_SNAPSHOT_DIR, or set staleness to 0"),
    Exclusion(STALE, (CHECK,), "the workers' parameters differ then",
              "Unset P3_CHECK, or set staleness to 0"),
    Exclusion(STALE, (MOVING,), "its workers have no round in common after which rows could move",
              "Set P3_PARTITIONS, before the key is declared"),
    Exclusion(STALE, (WEIGHTS,), "a gradient weighs its share of all that its step has, and there are no common steps",
              "Leave weigh() out, or set staleness to 0"),
    _gives_way(AGGREGATION, (STALE,), "the push of each worker is an update of its own",
               "Each worker of a machine pushes on its own"),
    Exclusion(DGC, (AVERAGE, MEAN), "what workers send are steps, and the servers subtract their sum",
              "Use sums, and divide by the number of workers in rescale_grad, or by the joined batch size in "
              "Trainer.step"),
    Exclusion(DGC, (OTHER_RULE,), "the workers apply the momentum, and the servers only subtract what they send",
              "Use SGD without nesterov, dampening, maximize and clip_gradient (dgc has a clip_norm), or another "
              "compression"),
    Exclusion(DGC, (NO_RULE,), "what workers send are steps of SGD, which the servers must take",
              "Set an SGD optimizer before the first push (Trainer: update_on_kvstore=True; PyTorch: torch.optim.SGD "
              "without synchronous=True and max_grad_norm, dgc has a clip_norm), or use another compression"),
    Exclusion(DGC, (GPU,), "the workers' momentum is in CPU memory, and so must the gradients be",
              "Use another compression, or keep the model on the CPU"),
    Exclusion(DGC, (SCALER,), "a step that overflows is left out, and the servers have taken it by then",
              "Use another compression, or train without a loss scaler"),
    Exclusion(DGC, (STATE_FILES,), "each worker has a momentum of its own, which no file of states has room for",
              "Use snapshots, which keep all of them, and leave the optimizer's state out"),
    Exclusion(DGC, (STEPS_TAKEN,), "each worker has a momentum of its own, and cannot take over another one",
              "Resume from a snapshot, or begin with a new optimizer"),
    _gives_way(DGC, (ROWS, NOT_FLOAT32, VECTOR), "dgc is for dense float32 keys of at least two dimensions",
               "The gradients travel as they are, and the servers' SGD updates the key"),
    _gives_way(ENCODED, (ROWS, NOT_FLOAT32), "codecs are for dense float32 keys", "The gradients travel as they are"),
    _gives_way(DGC, (FACTORS,), "the factors are not the gradient", "The factors travel as they are"),
    _gives_way(ENCODED, (FACTORS,), "the factors are not the gradient", "The factors travel as they are"),
    _gives_way(AGGREGATION, (DGC,), "each worker has a momentum of its own",
               "Each worker of a machine pushes its steps on its own"),
    _gives_way(GROUPS, (STALE, ENCODED, ENCODED_BACK, DGC, FACTORS, ROWS, NORM),
               "leaders add up dense gradients and pass values on, as they are",
               "Each worker pushes such a key by itself"),
    Exclusion(ENCODED_BACK, (DGC,), "of dgc only the steps come back, in few bytes already",
              'Leave out "down", or use another compression'),
    _gives_way(ENCODED_BACK, (STALE,), "workers that are rounds apart have no value in common that could change",
               "Values come back whole"),
    _gives_way(ENCODED_BACK, (ROWS, NOT_FLOAT32, VECTOR),
               "it is for dense float32 keys of at least two dimensions; of a bias or a scale few bytes come back",
               "They come back as they are"),
    _gives_way(ENCODED_BACK, (FACTORS,), "what comes back are the others' factors", "They travel as they are"),
    _gives_way(ENCODED_BACK, (NORM,), "norms are sixteen bytes of each server", "They travel as they are"),
    Exclusion(LOW_RANK, (STALE,), "it sums thin matrices of all workers in a round, and there is no such round",
              "Use another compression, or set staleness to 0"),
    Exclusion(LOW_RANK, _RULES, "thin matrices come back, of which each worker makes the gradient; the servers have "
              "none to update by", "Let the workers update, as DistributedOptimizer does by itself; or use another "
              "compression"),
    Exclusion(LOW_RANK, (ENCODED_BACK,), "what comes back are few bytes already", 'Leave out "down"'),
    Exclusion(LOW_RANK, (NORM,), "the servers sum thin matrices, whose norm is not the gradient's",
              "Use another compression; DistributedOptimizer(max_grad_norm=...) clips with lowrank, and waits for the "
              "gradients"),
    Exclusion(LOW_RANK, (SCALER, NAMED_SCALER, UNNAMED_SCALER, LATE_SCALER),
              "what it leaves out has the scale of the loss, and goes with no scaler",
              "Use a type that keeps nothing, bf16 or fp16, or train without a loss scaler"),
    Exclusion(LOW_RANK, (GPU,), "its products are made in CPU memory, of the whole gradient",
              "Use another compression, or keep the model on the CPU"),
    Exclusion(LOW_RANK, (MXNET,), "its rounds are not operations of MXNet's engine", "Use another compression"),
    Exclusion(LOW_RANK, (DGC,), "dgc needs an optimizer on the servers, and with lowrank the workers update",
              "Use one of the two"),
    _gives_way(LOW_RANK, (ROWS, NOT_FLOAT32, VECTOR), "it is for dense float32 keys of at least two dimensions",
               "The gradients travel as they are"),
    _gives_way(LOW_RANK, (FACTORS,), "the factors are not the gradient", "The factors travel as they are"),
    Exclusion(RESIDUAL_BACK, (SCALER, NAMED_SCALER, UNNAMED_SCALER, LATE_SCALER),
              "what the servers have left out of sums has the scale of the loss, and they cannot undo a step that is "
              "left out", 'Use bf16 or fp16 for what comes back ("down"), which keep nothing, or leave it whole'),
    Exclusion(RESIDUAL, (UNNAMED_SCALER,), "what it leaves out has the scale of the loss, and must change with it",
              "Pass grad_scaler=scaler to DistributedOptimizer, so that both change together; or use a type that keeps "
              "nothing (docs/compression.md)"),
    Exclusion(RESIDUAL, (LATE_SCALER,), "what it leaves out has the scale of the loss, and that a step is left out is "
              "known only when the next one has begun", "Pass synchronous=True to DistributedOptimizer, or use a type "
              "that keeps nothing (docs/compression.md)"),
    Exclusion(NAMED_SCALER, (UNAWAITED,), "torch's GradScaler must see the mean gradients before the update",
              "Use p3.torch.GradScaler, or pass synchronous=True to DistributedOptimizer"),
    Exclusion(FACTORS, (SNAPSHOTS,), _WEIGHT_ELSEWHERE, "Unset P3_SNAPSHOT_DIR, or %s" % _LEAVE_OUT),
    Exclusion(FACTORS, (ADDED_UP,), "factors can be multiplied, but not added to a gradient",
              "Call zero_grad() before each backward(), or %s" % _LEAVE_OUT),
    _gives_way(FACTORS, (NOT_FLOAT32, GPU), "the product of all factors is computed by the core, in float32",
               "The layer stays dense, which the log says"),
    Exclusion(ROWS, (GPU,), "the number of rows of a sparse gradient is not known without waiting for the device",
              "Pass sparse=False to its module, or keep the module on the CPU"),
    Exclusion(WHOLE_NUMBERS, (AVERAGE, MEAN), "only floating point numbers can be averaged",
              "Put the key into another store"),
    Exclusion(WHOLE_NUMBERS, _RULES, "an optimizer updates floating point numbers only",
              "Put the key into a store without an optimizer"),
    Exclusion(NORM, (STALE,), "a norm is of what all workers have sent in a round, and with staleness there is no such "
              "round", "Set staleness to 0"),
    Exclusion(NORM, _RULES, "it is of sums that go out, and the servers' optimizer keeps them",
              "Let the workers update: a store without an optimizer (Trainer: update_on_kvstore=False)"),
    Exclusion(NORM, (DGC,), "what workers send are steps, and no sums go out",
              "Use another compression; dgc has a clip_norm of its own"),
    _gives_way(ENCODED, (NORM,), "norms are sixteen bytes of each server", "They travel as they are"),
    Exclusion(NORM, (MOVING,), "while rows move, no server could say that it has summed all of a round",
              "Set P3_PARTITIONS, before the key is declared"),
    Exclusion(CLIPPING, (FACTORS,), "the servers have no sums of factors, so their norm would lack the layer's",
              "Leave the layer out of p3.factors"),
    Exclusion(CLIPPING, (SCALER,), "the norm that the servers tell is of gradients that have the scale of the loss",
              "Leave set_clipping() out, and call gluon.utils.clip_global_norm behind amp.unscale"),
    Exclusion(LEAVING, (STALE,), "a gradient updates the weights by itself, and not as one of so many",
              "Unset P3_ON_WORKER_LOSS, or set staleness to 0"),
    Exclusion(LEAVING, (DGC, LOW_RANK), "each worker divides by the number of workers itself, which would be another "
              "one", "Use another compression, or unset P3_ON_WORKER_LOSS"),
    Exclusion(LEAVING, (FACTORS,), "every worker needs the factors of every other one",
              "Unset P3_ON_WORKER_LOSS, or %s" % _LEAVE_OUT),
    Exclusion(LEAVING, (WEIGHTS_OF_ENDED,), "nobody can tell how many workers there are that take no steps",
              "Unset P3_ON_WORKER_LOSS, or let all workers take as many steps, weigh(0) included"),
    Exclusion(LEAVING, (TRAINERS,), "it gathers batches and metrics by torch.distributed, which fails with a worker",
              "Unset P3_ON_WORKER_LOSS, and let the job start again from a snapshot: p3 run --restarts"),
    Exclusion(LEAVING, (AGGREGATION,), "what a worker had added up for others would be lost with it",
              "Leave P3_LOCAL_AGGREGATION unset"),
    Exclusion(LEAVING, (GROUPS,), "what a worker had added up for others would be lost with it",
              "Leave P3_GROUPS unset"),
    Exclusion(LEAVING, (MOVING,), "rows that move would be lost with a worker",
              "Set P3_PARTITIONS, before the key is declared; or unset P3_ON_WORKER_LOSS"),
    _gives_way(ENTERING, (LOCAL_STEPS, BY_MODULE, REPLICAS),
               "what a worker has of its own there, nobody hands on to one that joins",
               "Nobody can join, and the places of lost and further workers stay empty, which the log says"),
    Exclusion(HEIRS, (STALE, DGC), "the servers keep the values that they update, which would be lost with one",
              "Train in common rounds, without dgc: then the servers only sum, and each worker updates. Or unset "
              "P3_ON_SERVER_LOSS"),
    Exclusion(HEIRS, (RESIDUAL_BACK,), "what the servers have left out of sums would be lost with one",
              'Use bf16 or fp16 for what comes back ("down"), or unset P3_ON_SERVER_LOSS'),
    Exclusion(HEIRS, (ROWS, FACTORS), "only dense sums are kept by the workers, for who takes over from a lost server",
              "Pass sparse=False to the modules, leave p3.factors out, or unset P3_ON_SERVER_LOSS"),
    Exclusion(HEIRS, (LOW_RANK,), "nobody has tried it", "Use another compression, or unset P3_ON_SERVER_LOSS"),
    Exclusion(HEIRS, (AGGREGATION,), "what has come for a whole machine, its leader has alone",
              "Leave P3_LOCAL_AGGREGATION unset"),
    Exclusion(HEIRS, (GROUPS,), "what has come for a whole group, its leader has alone", "Leave P3_GROUPS unset"),
    Exclusion(HEIRS, (LOCAL_STEPS,), "the servers keep the global weights, which would be lost with one",
              "Unset P3_ON_SERVER_LOSS"),
    Exclusion(RECUT, (STALE, SGD, OTHER_RULE, DGC), "the servers keep values and states, which would have to move",
              'Let the workers update: DistributedOptimizer does by itself with strategy="auto", without staleness '
              "and dgc, and with synchronous=True or max_grad_norm; or leave it out"),
    Exclusion(RECUT, (RESIDUAL_BACK,), "what the servers have left out of sums would have to move",
              'Use bf16 or fp16 for what comes back ("down"), or leave it out'),
    Exclusion(RECUT, (LOW_RANK,), "nobody has tried it", "Use another compression, or leave it out"),
    Exclusion(RECUT, (HEIRS,), "who takes over from a lost server goes by what the workers have of each slice, and of "
              "one that was just cut they have nothing", "Leave it out, or unset P3_ON_SERVER_LOSS"),
    Exclusion(RECUT, (LOCAL_STEPS, MXNET), "nobody has tried it",
              "Leave it out; `p3 plan` writes a strategy to a file"),
    Exclusion(JOIN, (NAMED_SCALER,), "a worker in join() cannot tell which steps the scaler leaves out",
              "Give all workers the same number of steps"),
    Exclusion(JOIN, (LATE_SCALER,), "a worker in join() does not call the scaler's update(), so scales would differ",
              "Give all workers the same number of steps"),
    Exclusion(JOIN, (SHOWN_MEANS,), "a worker that has joined takes the others' steps from the mean gradients, and "
              "cannot tell what a script makes of these",
              "Clip by max_grad_norm=, or give all workers the same number of steps"),
    Exclusion(JOIN, (LEFT_OUT,), "a worker that has joined takes every step of the others",
              "Give all workers the same number of steps (even_batches=True of Accelerate), or leave out none"),
    Exclusion(JOIN, (CLOSURE,), "a closure may compute many gradients in one step, and a worker that has joined could "
              "not tell how many", "Give all workers the same number of steps"),
    Exclusion(INDEPENDENT, (AWAITED,), "it would be updated when a module needs its weights, and not in step()",
              "Leave out one of the two"),
    Exclusion(INDEPENDENT, (JOINT,), "its updates need the gradients of all parameters",
              "Leave out independent=True"),
    Exclusion(LOCAL_STEPS, (STALE,), "a fragment's exchange is a round of all workers, who have its delay to end it in",
              "Leave staleness out, and take a larger delay"),
    Exclusion(LOCAL_STEPS, (DGC,), "dgc sends steps of SGD, and what travels are differences of weights",
              'Take "topk" or "int4" as codec'),
    Exclusion(LOCAL_STEPS, (LOW_RANK,), "lowrank is for gradients, and what travels are differences of weights",
              'Take "topk" or "int4" as codec'),
    Exclusion(LOCAL_STEPS, (PLANNED,), "that is of gradients, and what travels are differences of weights",
              "Take it out of the strategy; a codec is said to LocalSteps(codec=...)"),
    Exclusion(LOCAL_STEPS, (FACTORS,), "no gradients travel, whose factors these are",
              "Leave p3.torch.factors out"),
    Exclusion(LOCAL_STEPS, (CLIPPED,), "each worker's gradients are its own",
              "Clip them in the script, by torch.nn.utils.clip_grad_norm_"),
    Exclusion(LOCAL_STEPS, (NAMED_SCALER,), "the optimizer's steps are torch's own, as a scaler wants them",
              "Use torch's GradScaler as without P3"),
    Exclusion(LOCAL_STEPS, (MXNET,), "it shares the gradients of each step, or the weights after it",
              "Give the Trainer kvstore=None"),
    Exclusion(LOCAL_STEPS, (SCALER,), "it leaves out steps on this worker alone, and all take the same number",
              "Train without a loss scaler"),
    Exclusion(LOCAL_STEPS, (AWAITED, INDEPENDENT), "no step waits for the other workers",
              "Leave it out"),
    Exclusion(BY_MODULE, (SNAPSHOTS,), "a snapshot knows nothing of Module, which has the weights",
              "Unset MXNET_UPDATE_ON_KVSTORE; or unset P3_SNAPSHOT_DIR, and use Module's own checkpoints"),
    Exclusion(QUORUM, (ENCODED_BACK,), "who is late has no value in common with the others that could change",
              'Compress one way alone, as codec={"up": "int4"}'),
    Exclusion(QUORUM, (SNAPSHOTS,), "exchanges that are under way have no common round that a snapshot could be of",
              "Unset P3_SNAPSHOT_DIR, and save state_dict() in the script"),
    Exclusion(QUORUM, (CHECK,), "who is late has another global value until its next exchange", "Unset P3_CHECK"),
    Exclusion(QUORUM, (SITES,), "nobody has tried it", "Leave quorum out"),
    Exclusion(QUORUM, (TRAINERS,), "a trainer's workers save and evaluate at steps that they count by themselves",
              "Leave quorum out, or write the loop yourself"),
    Exclusion(SITES, (GRADIENTS,), "its processes share gradients among themselves, and weights with other sites",
              "Take LocalSteps, with DistributedDataParallel within the site; or leave p3.torch.site out, and each "
              "process is a worker"),
    Exclusion(SITES, (TRAINERS,), "it makes one group of torch.distributed of all workers, and a site has its own",
              "Write the loop yourself, or leave p3.torch.site out, and each process is a worker"),
    # What the planner never makes. A server that is to define such a key says so.
    Exclusion(FACTORS, (ROWS,), "factors are dense", _SAME_VERSION),
    Exclusion(NORM, (ROWS, FACTORS), "norms are dense; %s" % _NO_SUCH_PLAN, _SAME_VERSION),
    Exclusion(BY_STEPS, (PLAIN, ENCODED), "steps are what dgc sends; %s" % _NO_SUCH_PLAN, _SAME_VERSION),
    Exclusion(DGC, (BY_SERVERS, BY_WORKERS), "dgc sends steps; %s" % _NO_SUCH_PLAN, _SAME_VERSION),
    Exclusion(BY_WORKERS, (DENSE, ROWS), "each worker updates what is gathered; %s" % _NO_SUCH_PLAN, _SAME_VERSION),
    Exclusion(FACTORS, (BY_SERVERS, BY_STEPS), "each worker updates what is gathered; %s" % _NO_SUCH_PLAN,
              _SAME_VERSION),
)  # fmt: skip


def between(one: Choice, other: Choice) -> Optional[Exclusion]:
    """What excludes the two from each other; None: they go together."""
    for exclusion in EXCLUSIONS:
        if one == exclusion.choice and other in exclusion.others:
            return exclusion
        if other == exclusion.choice and one in exclusion.others:
            return exclusion
    return None


def refusal(*chosen: Choice) -> str:
    """Why these cannot be had at once, and what to do instead; "" if they can, or if one gives way by itself."""
    return next((text for exclusion, text in _excluded(chosen) if not exclusion.yields), "")


def require(where: str, *chosen: Choice) -> None:
    """ValueError unless these can be had at once. `where`: who asks for them, and for which key or store."""
    text = refusal(*chosen)
    if text:
        raise ValueError("%s: %s" % (where, text))


def yielding(*chosen: Choice) -> str:
    """Which of these gives way by itself, to which, and what is done then; "" if none does."""
    return next((text for exclusion, text in _excluded(chosen) if exclusion.yields), "")


def _excluded(chosen: Tuple[Choice, ...]) -> Iterator[Tuple[Exclusion, str]]:
    """In the order of the table."""
    for exclusion in EXCLUSIONS:
        if exclusion.choice in chosen:
            choice = chosen[chosen.index(exclusion.choice)]
            for other in chosen:
                if other in exclusion.others:
                    yield exclusion, exclusion.text(choice, other)


def contradiction(plan: KeyPlan) -> str:
    """As refusal(), of what has been decided: nothing can give way any more."""
    return next((text for _exclusion, text in _excluded(tuple(of_plan(plan)))), "")


# docs/strategies.md

_COLUMNS = (STALE, ENCODED, ENCODED_BACK, DGC, LOW_RANK, FACTORS, ROWS, AVERAGE)
_BESIDE = (*_COLUMNS, SGD, OTHER_RULE, NO_RULE, SNAPSHOTS, LEAVING, HEIRS, AGGREGATION, GROUPS, MOVING, RECUT)


def tables() -> str:
    """Which of the strategies goes with what; and of what does not, why, and what to do."""
    lines = ["| | %s |" % " | ".join(choice.words for choice in _COLUMNS), "|---" * (len(_COLUMNS) + 1) + "|"]
    for choice in _BESIDE:
        lines.append("| %s | %s |" % (_explained(choice), " | ".join(_cell(choice, column) for column in _COLUMNS)))
    asked = [one for one in EXCLUSIONS if one.instead != _SAME_VERSION]  # a script may ask for these
    lines += ["", "| this | and this | why not | what to do |", "|---|---|---|---|"]
    lines += [_row(one) for one in asked if not one.yields]
    lines += ["", "| this | gives way to | why | what is done |", "|---|---|---|---|"]
    lines += [_row(one) for one in asked if one.yields]
    return "\n".join(lines)


def _row(one: Exclusion) -> str:
    return "| %s | %s | %s | %s |" % (_named(one.choice), ", ".join(map(_named, one.others)), one.why, one.instead)


def _named(choice: Choice) -> str:
    return choice.words if choice in _BESIDE else _explained(choice)


def _explained(choice: Choice) -> str:
    return "%s (%s)" % (choice.words, choice.asked_by) if choice.asked_by else choice.words


def _cell(choice: Choice, column: Choice) -> str:
    if choice == column or {choice, column} <= {ENCODED, DGC, LOW_RANK}:
        return ""
    exclusion = between(choice, column)
    if exclusion is None:
        return "yes"
    return "%s gives way" % exclusion.choice.words if exclusion.yields else "**no**"


if __name__ == "__main__":
    print(tables())
