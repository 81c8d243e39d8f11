package e2e_test

import (
	"cmp"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"text/tabwriter"

	gocmp "github.com/google/go-cmp/cmp"

	"github.com/extevict/extevict/internal/envoy"
)

// found returns the Envoy that all tests but TestVersions are for.
func found(t testing.TB) string {
	t.Helper()
	bin, err := envoy.Find()
	if err != nil {
		t.Fatal(err)
	}
	return bin
}

var versions sync.Map // of binaries, by path

// versionOf returns the version of an Envoy.
func versionOf(t testing.TB, bin string) string {
	t.Helper()
	if v, ok := versions.Load(bin); ok {
		return v.(string)
	}
	v, err := envoy.Version(bin)
	if err != nil {
		t.Fatal(err)
	}
	versions.Store(bin, v)
	return v
}

// is reports whether a version is of a minor version, such as "1.36".
func is(version, minor string) bool { return strings.HasPrefix(version, minor+".") }

// matrixFile is the matrix, as measured.
const matrixFile = "testdata/matrix.txt"

var pin = flag.Bool("pin", false, "let TestVersions write "+matrixFile+" anew, from what it measures")

// TestVersions plays all scenes on several versions of Envoy, prints what comes of them
// and holds it against matrixFile. The versions are those of the binaries in the
// environment variable ENVOY_BINS, a list like PATH, or else of ENVOY_BIN.
func TestVersions(t *testing.T) {
	bins := filepath.SplitList(os.Getenv("ENVOY_BINS"))
	if len(bins) == 0 {
		bins = []string{found(t)}
	}
	got := newOutcomes()
	played := make(map[string]bool) // else -run is for other scenes
	for _, bin := range bins {
		v := versionOf(t, bin)
		got.versions = append(got.versions, v)
		for _, s := range scenes {
			t.Run(v+"/"+s.name, func(t *testing.T) {
				played[s.name] = true
				for _, c := range s.play(t, bin) {
					if !got.add(row(s.name, c.row), v, strings.Join(strings.Fields(c.got), ",")) {
						t.Errorf("no name for a row, or twice: %q", c.row)
					}
				}
			})
		}
	}
	fmt.Print(got) // go test shows it if it runs in this directory, or fails
	if *pin {
		if err := os.WriteFile(matrixFile, []byte(got.String()), 0o666); err != nil {
			t.Error(err)
		}
		return
	}
	b, err := os.ReadFile(matrixFile)
	if err != nil {
		t.Fatal(err)
	}
	want, err := parseOutcomes(string(b))
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range scenes {
		if !played[s.name] {
			want.drop(s.name)
		}
	}
	for _, v := range got.versions {
		if d := gocmp.Diff(want.of(v), got.of(v)); d != "" {
			t.Errorf("Envoy %s (-%s +got):\n%s", v, matrixFile, d)
		}
	}
}

// outcomes are the matrix: what came of each row, "scene row", on each version.
type outcomes struct {
	versions []string
	rows     []string
	cells    map[string]map[string]string // by row and version; none where there is no such row
}

func newOutcomes() *outcomes { return &outcomes{cells: make(map[string]map[string]string)} }

// add reports whether row is a name that is not taken.
func (o *outcomes) add(row, version, got string) bool {
	if _, ok := o.cells[row][version]; ok || len(strings.Fields(row)) != 2 {
		return false
	}
	if o.cells[row] == nil {
		o.cells[row] = make(map[string]string)
		o.rows = append(o.rows, row)
	}
	o.cells[row][version] = got
	return true
}

// drop removes a scene.
func (o *outcomes) drop(scene string) {
	o.rows = slices.DeleteFunc(o.rows, func(r string) bool { return strings.HasPrefix(r, scene+" ") })
}

// of returns the column of a version: each cell's words, by row.
func (o *outcomes) of(version string) map[string][]string {
	words := make(map[string][]string)
	for _, r := range o.rows {
		if got, ok := o.cells[r][version]; ok {
			words[r] = strings.Split(got, ",")
		}
	}
	return words
}

// String returns o as a table, with a paragraph for each scene. "=" is the same as to
// the left, and "-" no such row.
func (o *outcomes) String() string {
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	fmt.Fprintf(w, "scene\trow\t%s\n", strings.Join(o.versions, "\t"))
	before := ""
	for _, r := range o.rows {
		scene, name, _ := strings.Cut(r, " ")
		if scene != before {
			fmt.Fprintln(w)
			before = scene
		}
		fmt.Fprintf(w, "%s\t%s", scene, name)
		left := "="
		for _, v := range o.versions {
			got := cmp.Or(o.cells[r][v], "-")
			if got == left {
				got = "="
			} else {
				left = got
			}
			fmt.Fprintf(w, "\t%s", got)
		}
		fmt.Fprintln(w)
	}
	w.Flush()
	return b.String()
}

// parseOutcomes is the inverse of String.
func parseOutcomes(s string) (*outcomes, error) {
	o := newOutcomes()
	for l := range strings.Lines(s) {
		words := strings.Fields(l)
		switch {
		case len(words) == 0:
			continue
		case o.versions == nil:
			o.versions = words[min(2, len(words)):]
			continue
		case len(words) != 2+len(o.versions):
			return nil, fmt.Errorf("%d words, want %d: %s", len(words), 2+len(o.versions), l)
		}
		left := ""
		for i, v := range o.versions {
			if w := words[2+i]; w != "=" {
				left = w
			}
			if left != "-" && !o.add(row(words[0], words[1]), v, left) {
				return nil, fmt.Errorf("twice: %s", l)
			}
		}
	}
	return o, nil
}
