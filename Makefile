# Two commands: `make tab3` measures and prints Table 3, `make test` runs the tests. Both build .venv when needed.
# The first Python of a served version that really starts; or name one: make PYTHON=/path/to/python3.12
SERVED := import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))
PYTHON ?= $(shell for p in python3.12 python3.11 python3 python; do \
	$$p -c '$(SERVED)' 2>/dev/null && echo $$p && break; done)
VENV := .venv
STAMP := $(VENV)/.installed

.PHONY: tab3 bench test quality check clean

tab3: $(STAMP)
	$(VENV)/bin/snakemake tab3 $(if $(CONFIG),--config $(CONFIG))

bench: $(STAMP)
	$(VENV)/bin/snakemake bench $(if $(CONFIG),--config $(CONFIG))

test: $(STAMP)
	$(VENV)/bin/python -m pytest -n 2 --dist loadfile

quality: $(STAMP)
	$(VENV)/bin/snakemake quality-env

check: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/snakefmt --check Snakefile experiments/rules
	$(VENV)/bin/snakemake --lint

$(STAMP): pyproject.toml constraints.txt setup.py $(wildcard edge0/kernels/*.[ch])
	@test -n "$(PYTHON)" || { echo "edge0: Python 3.11 or 3.12 is needed and none was found; make PYTHON=/path/to/it" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[harness,dev]'
	@touch $(STAMP)

clean:
	rm -rf $(VENV) models .snakemake
