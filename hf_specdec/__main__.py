"""`python -m hf_specdec` is the command `hf-specdec`."""

from .cli import app

if __name__ == "__main__":
    app(prog_name="hf-specdec")
