# Turns an optimizer's description into the C++ core's OptimizerSpec. Included by _kernels.pyx and _core.pyx,
# which must not declare Algorithm and OptimizerSpec themselves.

cdef extern from "p3/optimizer.h" namespace "p3" nogil:
    cdef enum class Algorithm(unsigned char):
        pass

    cdef cppclass OptimizerSpec:
        OptimizerSpec() except +
        Algorithm algorithm
        double momentum
        double beta1
        double beta2
        double epsilon
        double gamma1
        double gamma2
        double rho
        double beta
        double lamda1
        double lamda
        double wd_lh
        double schedule_decay
        double clip_gradient
        double clip_weights
        bint multi_precision


# The values of the C++ enumeration.
cdef dict _ALGORITHMS = {
    "sgd": 0,
    "nag": 1,
    "adam": 2,
    "adagrad": 3,
    "rmsprop": 4,
    "rmsprop_centered": 5,
    "signum": 6,
    "ftml": 7,
    "ftrl": 8,
    "adadelta": 9,
    "adamax": 10,
    "nadam": 11,
    "dcasgd": 12,
    "test": 13,
}


# ValueError, naming the field, unless the description is complete and sensible (p3/server/optimizers.py).
cdef OptimizerSpec optimizer_spec(description) except *:
    from p3.server.optimizers import validate

    validate(description)
    cdef OptimizerSpec spec
    spec.algorithm = <Algorithm> <unsigned char> _ALGORITHMS[description["name"]]
    # A field that the algorithm does not have keeps the default of the C++ struct.
    spec.momentum = description.get("momentum", spec.momentum)
    spec.beta1 = description.get("beta1", spec.beta1)
    spec.beta2 = description.get("beta2", spec.beta2)
    spec.epsilon = description.get("epsilon", spec.epsilon)
    spec.gamma1 = description.get("gamma1", spec.gamma1)
    spec.gamma2 = description.get("gamma2", spec.gamma2)
    spec.rho = description.get("rho", spec.rho)
    spec.beta = description.get("beta", spec.beta)
    spec.lamda1 = description.get("lamda1", spec.lamda1)
    spec.lamda = description.get("lamda", spec.lamda)
    spec.wd_lh = description.get("wd_lh", spec.wd_lh)
    spec.schedule_decay = description.get("schedule_decay", spec.schedule_decay)
    spec.clip_gradient = description["clip_gradient"]
    spec.clip_weights = description.get("clip_weights", spec.clip_weights)
    spec.multi_precision = description["multi_precision"]
    return spec
