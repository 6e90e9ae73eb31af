PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
.DEFAULT_GOAL := help

.PHONY: help proto
help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

PROTOS := $(wildcard protos/shoal/v1/*.proto)
proto:  ## generate the stubs from protos/
	$(BIN)/python -m grpc_tools.protoc -I protos --python_out=clients/python --grpc_python_out=clients/python \
	  --mypy_out=readable_stubs,quiet:clients/python --mypy_grpc_out=quiet:clients/python $(PROTOS)
