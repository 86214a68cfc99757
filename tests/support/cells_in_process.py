"""A notebook's cells run in this process, without a kernel: seconds instead of minutes for many parameters."""

import ast
import os
import warnings

from decodebench.show import notebooks


class Shown:
    """What a cell's last expression was, and how it shows itself."""

    def __init__(self, value):
        self.value = value
        facts = getattr(value, "_repr_mimebundle_", None)
        chart = hasattr(value, "draw_without_rendering")
        if chart:  # laid out, but neither SVG nor PNG is written
            value.draw_without_rendering()
            self.facts = {"role": "chart", "name": value.name, "alt": value.alt}
        else:
            self.facts = facts()[1].get("decodebench", {}) if facts else {}

    @property
    def role(self):
        return self.facts.get("role")


def run(path, parameters, folder=None):
    """Run the notebook with ``parameters`` over its own; the ``Shown`` of every cell that shows something."""
    notebook = notebooks._with_parameters(notebooks._read(path), parameters, path)
    space, shown = {"__name__": "__main__"}, []
    before = os.getcwd()
    os.chdir(folder or path.parent)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for cell in notebook.cells:
                if cell.cell_type != "code":
                    continue
                tree = ast.parse(cell.source)
                last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
                exec(compile(tree, path.stem, "exec"), space)
                if last is not None:
                    value = eval(compile(ast.Expression(last.value), path.stem, "eval"), space)
                    if value is not None:
                        shown.append(Shown(value))
    finally:
        os.chdir(before)
    return shown
