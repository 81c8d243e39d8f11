package e2e_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// table returns the rows of a table of words, with single spaces.
func table(s string) (rows []string) {
	for l := range strings.Lines(strings.TrimSpace(s)) {
		rows = append(rows, strings.Join(strings.Fields(l), " "))
	}
	return rows
}

// row returns a row of a table.
func row(columns ...any) string {
	return strings.TrimSuffix(fmt.Sprintln(columns...), "\n")
}

// compareRows holds each path's rows, by the path's name, against a table.
func compareRows(t *testing.T, want string, got map[string][]string) {
	t.Helper()
	for name, g := range got {
		if d := cmp.Diff(table(want), g); d != "" {
			t.Errorf("%s (-want +got):\n%s", name, d)
		}
	}
}
