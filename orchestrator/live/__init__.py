"""The live page: a running sweep in the browser, served on loopback by starlette and uvicorn. Uses the commands'
implementation, and the same wording as reports and the terminal."""
