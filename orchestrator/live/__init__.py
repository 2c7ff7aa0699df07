"""The live page: a sweep in the browser while it runs, served on loopback by starlette and uvicorn. Knows the use cases
of the command line, and shows a sweep in the words that reports and the terminal use."""
