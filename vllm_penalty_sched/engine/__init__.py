"""The parts that touch vLLM: the scheduler adapter and its virtual-time simulator."""
