"""Messages between the parts of a gang, and the outcome and progress that follow from them. Imports ``base`` and
``hardware``, and starts no process."""
