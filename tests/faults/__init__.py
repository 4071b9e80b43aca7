"""The fault plan: engines that inject faults into stores, with CI's counts or the plan's (`plan.ROWS`)."""
