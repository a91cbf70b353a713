"""Check the tables of docs/api/names.md against the installed torch: ``python -m tests.compat``.

Prints each line of the table that does not hold, and ends with 1 if there is one. ``--write`` corrects the
tables; what is new gets no reason, and that is for a person to write.
"""

import argparse
import sys

from . import names, table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="correct the tables")
    parser.add_argument("--reason", default="", help="with --write: the reason of names that are missing")
    arguments = parser.parse_args()
    found = names.compare()
    text = table.DOCUMENT.read_text(encoding="utf-8")
    if arguments.write:
        text = table.written(text, found, {"missing": arguments.reason})
        table.DOCUMENT.write_text(text, encoding="utf-8")
    wrong = list(table.problems(found, table.read(text)))
    print("\n".join(wrong), end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
