# Turns an optimizer's description into the C++ core's OptimizerSpec. Included by _kernels.pyx and _core.pyx,
# which must not declare Algorithm and OptimizerSpec themselves.

cdef extern from "p3/optimizer.h" namespace "p3" nogil:
    cdef enum class Algorithm(unsigned char):
        kSgd
        kNag
        kAdam
        kAdaGrad
        kRmsProp
        kRmsPropCentered

    cdef cppclass OptimizerSpec:
        OptimizerSpec() except +
        Algorithm algorithm
        double momentum
        double beta1
        double beta2
        double epsilon
        double gamma1
        double gamma2
        double clip_gradient
        double clip_weights
        bint multi_precision


# ValueError, naming the field, unless the description is complete and sensible (p3/server/optimizers.py).
cdef OptimizerSpec optimizer_spec(description) except *:
    from p3.server.optimizers import validate

    validate(description)
    cdef OptimizerSpec spec
    name = description["name"]
    if name == "sgd":
        spec.algorithm = Algorithm.kSgd
    elif name == "nag":
        spec.algorithm = Algorithm.kNag
    elif name == "adam":
        spec.algorithm = Algorithm.kAdam
    elif name == "adagrad":
        spec.algorithm = Algorithm.kAdaGrad
    elif name == "rmsprop":
        spec.algorithm = Algorithm.kRmsProp
    elif name == "rmsprop_centered":
        spec.algorithm = Algorithm.kRmsPropCentered
    else:
        raise ValueError(f"optimizer: {name!r} has no algorithm in the core")
    # A field that the algorithm does not have keeps the default of the C++ struct.
    spec.momentum = description.get("momentum", spec.momentum)
    spec.beta1 = description.get("beta1", spec.beta1)
    spec.beta2 = description.get("beta2", spec.beta2)
    spec.epsilon = description.get("epsilon", spec.epsilon)
    spec.gamma1 = description.get("gamma1", spec.gamma1)
    spec.gamma2 = description.get("gamma2", spec.gamma2)
    spec.clip_gradient = description["clip_gradient"]
    spec.clip_weights = description.get("clip_weights", spec.clip_weights)
    spec.multi_precision = description["multi_precision"]
    return spec
