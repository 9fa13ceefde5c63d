"""Control: the head's decisions: who samples what (admission), what makes a batch, when weights move."""
