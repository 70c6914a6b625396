"""The passes of an operator as compiled C, where there is a C compiler; see ARCHITECTURE.md."""
