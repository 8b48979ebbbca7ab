import random_programs
import store_programs
from store_programs.draw import programs

random_programs.main(store_programs.__doc__, programs(), store_programs.make_runner, store_programs.JOBS,
                     store_programs.COMMAND)  # fmt: skip
