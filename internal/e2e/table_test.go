package e2e_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// table returns the rows of a table of words, with single spaces, as they are for a
// version of Envoy, or for the fake, "". What begins with a version, such as "1.36:",
// is there in the place of the row before it, and nowhere else.
func table(s, envoy string) (rows []string) {
	for l := range strings.Lines(strings.TrimSpace(s)) {
		words := strings.Fields(l)
		if v, ok := strings.CutSuffix(words[0], ":"); ok {
			if !is(envoy, v) {
				continue
			}
			words, rows = words[1:], rows[:len(rows)-1]
		}
		rows = append(rows, strings.Join(words, " "))
	}
	return rows
}

// row returns a row of a table.
func row(columns ...any) string {
	return strings.TrimSuffix(fmt.Sprintln(columns...), "\n")
}

// compareRows holds each path's rows, by a name that begins with the path's, against a
// table.
func compareRows(t *testing.T, want string, got map[string][]string) {
	t.Helper()
	for name, g := range got {
		version := ""
		if !strings.HasPrefix(name, "fake") {
			version = versionOf(t, found(t))
		}
		if d := cmp.Diff(table(want, version), g); d != "" {
			t.Errorf("%s (-want +got):\n%s", name, d)
		}
	}
}
