"""Why a sweep's trials are as fast as they are: where the step time goes, what holds it back, which knob matters."""
