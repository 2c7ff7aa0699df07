"""Why a sweep's trials are as fast as they are: the parts of the step time, the bottleneck, and the knobs that
matter."""
