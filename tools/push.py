"""Upload of a finished run and its model card to the Hugging Face Hub.

    python tools/push.py --model runs/mine --repo me/mine        # or: make push MODEL=... REPO=...
    python tools/push.py --model runs/mine --repo me/mine --dry_run                # print files and card only

A missing repository is created. The token comes from `hf auth login` or HF_TOKEN; it is never printed or written.
"""

import sys
from pathlib import Path

if not __package__:  # run as a script: modules come from the repository, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from roberta_recipe.errors import exit_on_error
from roberta_recipe.input_files import resolve_path
from roberta_recipe.log import set_up_logging
from roberta_recipe.publishing import hub
from roberta_recipe.settings import RecipeParser


def main(argv: list[str] | None = None) -> None:
    """Run the command line `argv`. Raises `InputError` and `RunError`."""
    set_up_logging()
    parser = RecipeParser((), description=__doc__)
    parser.add_argument("--model", required=True, help="output_dir of a finished run")
    parser.add_argument("--repo", required=True, help="repository name; without a slash, in your own namespace")
    parser.add_argument("--results", nargs="*", default=[], help="folders of models fine-tuned from it, for its card")
    parser.add_argument("--private", action="store_true", help="make the repository private")
    parser.add_argument("--revision", help="branch to push to")
    parser.add_argument("--license", help="licence of the weights: mit, apache-2.0, ...")
    parser.add_argument("--language", nargs="+", help="language codes of the text (en); default: the run's")
    parser.add_argument("--replace", action="store_true", help="delete the files of another run in the repository")
    parser.add_argument("--dry_run", action="store_true", help="print files and card without pushing")
    args = parser.parse_args(argv)
    model, results = resolve_path(args.model), [resolve_path(folder) for folder in args.results]
    metadata = {name: value for name in ("license", "language") if (value := getattr(args, name))}
    if args.dry_run:
        folder = hub.prepare(args.repo, model, results, revision=args.revision, **metadata)
        print(Path(folder, "README.md").read_text(encoding="utf-8"))
        print("\n".join(f"{path.stat().st_size:>14,}  {path.name}" for path in sorted(folder.iterdir())))
        return
    hub.find_model(model)  # raises for a folder without a finished run, before any request
    run_id = hub.run_id(model)
    repo, ours = hub.open_repo(args.repo, run_id, args.private or None, args.revision, replace=args.replace)
    publisher = hub.Publisher(repo, run_id, args.revision)
    publisher.push(model, f"Upload {model.resolve().name}", results, replace=args.replace and not ours, **metadata)


if __name__ == "__main__":
    exit_on_error(main)
