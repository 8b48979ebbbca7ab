"""What trains with PyTorch imports half as much: its compiler is imported when something is compiled.

torch imports the compiler, torch._dynamo, when the first optimizer is made and at each step, only to tell it what it
shall not compile. Until a script imports the compiler there is nobody to tell.
"""

import functools
import sys


def _once_there_is_a_compiler(decorate, otherwise=lambda function: function):
    """`decorate`: torch's, which imports the compiler. What `otherwise` makes of a function runs without it."""

    def decorator(function=None, *arguments, **keywords):
        if function is None:
            return functools.partial(decorator, *arguments, **keywords)
        alone, decorated = otherwise(function), []

        @functools.wraps(function)
        def call(*args, **kwargs):
            if "torch._dynamo" not in sys.modules:
                return alone(*args, **kwargs)
            if not decorated:
                decorated.append(decorate(function, *arguments, **keywords))
            return decorated[0](*args, **kwargs)

        return call

    return decorator


def _load_what_disables(name):
    def load_and_change(load, module):
        load(module)
        setattr(module, name, _once_there_is_a_compiler(getattr(module, name)))

    return load_and_change


def _load_optimizer(load, module):
    load(module)
    set_grad_enabled = module.torch.set_grad_enabled

    def of_the_optimizer(step):
        def in_its_mode(optimizer, *args, **kwargs):
            with set_grad_enabled(optimizer.defaults["differentiable"]):
                return step(optimizer, *args, **kwargs)

        return in_its_mode

    name = "_use_grad_for_differentiable"
    setattr(module, name, _once_there_is_a_compiler(getattr(module, name), of_the_optimizer))


LOADS = {
    "torch._compile": _load_what_disables("_disable_dynamo"),
    "torch.compiler": _load_what_disables("disable"),
    "torch.optim.optimizer": _load_optimizer,
}
