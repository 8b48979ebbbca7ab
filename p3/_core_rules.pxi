def optimizer_rules():
    """Of each rule by name its fields, in their order: dicts of what `Field` has in include/p3/rule.h."""
    cdef vector[Rule] rules = all_rules()
    return {rule.name: rule.fields() for rule in rules}


# ValueError, naming the field, unless the description is complete and sensible (p3/plan/optimizers.py).
cdef OptimizerSpec optimizer_spec(description) except *:
    from p3.plan.optimizers import validate

    validate(description)
    cdef OptimizerSpec spec
    spec.name = description["name"]
    spec.fields = {field: value for field, value in description.items() if field != "name"}
    return spec


def state_names(description):
    """Of the arrays that the servers keep beside a weight, in the order of their parts: 1, 2 ..."""
    return c_state_names(optimizer_spec(description))


def state_parts(description, int dtype):
    """The parts that move with the rows of a key of that type: 0, the value; and what the optimizer keeps for them."""
    return [0] if description is None else list(parts_of(optimizer_spec(description), dtype_of(dtype)))
