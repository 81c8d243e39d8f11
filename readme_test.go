package extevict_test

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// TestReadme holds the README's Go against the compiled examples: each of its lines
// stands there, and the lines of one snippet in one file and in order.
func TestReadme(t *testing.T) {
	readme, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	var files []string
	for _, pattern := range []string{"examples/*/*.go", "*/example_test.go", "*/*/example_test.go"} {
		names, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, names...)
	}
	snippets := regexp.MustCompile("(?s)```go\n(.*?)```").FindAllStringSubmatch(string(readme), -1)
	if len(snippets) < 5 {
		t.Errorf("%d snippets", len(snippets))
	}
	for _, s := range snippets {
		want := lines(s[1])
		if !slices.ContainsFunc(files, func(name string) bool {
			text, err := os.ReadFile(name)
			if err != nil {
				t.Fatal(err)
			}
			have := lines(string(text))
			for i := range have {
				if len(have)-i >= len(want) && slices.Equal(have[i:i+len(want)], want) {
					return true
				}
			}
			return false
		}) {
			t.Errorf("in no example:\n%s", s[1])
		}
	}
}

// lines returns the lines of text that say something, without their indentation.
func lines(text string) (ls []string) {
	for l := range strings.Lines(text) {
		if l = strings.TrimSpace(l); l != "" {
			ls = append(ls, l)
		}
	}
	return ls
}
