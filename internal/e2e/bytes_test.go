package e2e_test

import (
	"bytes"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// A payload goes to the backend and comes back cut into pieces of other sizes.
type payload struct {
	name        string
	body        string
	piece       int // size of the pieces at most
	contentType string
	length      bool // with content-length
	trailer     bool
}

// echoes answers with the request's body.
func (p payload) echoes(_ *call, w http.ResponseWriter, r *http.Request) error {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return err
	}
	w.Header().Set("Content-Type", p.contentType)
	if p.length {
		w.Header().Set("Content-Length", r.Header.Get("Content-Length"))
	}
	if p.trailer {
		w.Header().Set("Trailer", "X-End")
		defer w.Header().Set("X-End", "yes")
	}
	for len(body) > 0 {
		n := min(1+rand.IntN(p.piece), len(body))
		if _, err := w.Write(body[:n]); err != nil {
			return err
		}
		if err := http.NewResponseController(w).Flush(); err != nil {
			return err
		}
		body = body[n:]
	}
	return nil
}

// TestSameBytes sends payloads there and back through a server without the library
// and one with it: nothing may differ.
func TestSameBytes(t *testing.T) {
	noise := make([]byte, 10<<20)
	rand.NewChaCha8([32]byte{}).Read(noise)
	for _, m := range modes {
		t.Run(m.String(), func(t *testing.T) {
			big := string(noise)
			if m == buffered {
				big = big[:512<<10] // Envoy's limit is 1 MiB
			}
			payloads := []payload{
				{"big", big, 64 << 10, "application/octet-stream", false, false},
				{"split SSE", events(300), 40, "text/event-stream", false, false},
				{"length", big[:1000], 300, "application/json", true, false},
				{"trailer", big[:1000], 300, "application/json", false, true},
				{"one byte", "x", 1, "text/plain", true, false},
			}
			plain, wrapped := start(t, setup{mode: m, adopt: bare}), start(t, setup{mode: m})
			for i := range plain.paths {
				for _, pl := range payloads {
					var got [2]reply
					for j, w := range []*world{plain, wrapped} {
						c := newCall(w.paths[i], pl.echoes)
						c.header = http.Header{"Content-Type": {pl.contentType}}
						c.body = bytes.NewReader([]byte(pl.body))
						w.start(t.Context(), c)
						c.must(t, done)
						got[j] = c.reply
						delete(got[j].header, "Date")
						delete(got[j].header, "X-Envoy-Upstream-Service-Time")
						if got[j].body != pl.body || got[j].err != nil || got[j].status != 200 {
							l, _ := w.line(c)
							t.Errorf("%s, %s: %d bytes of %d came back, status %d, %v; access log %+v", c.path.name, pl.name, len(got[j].body), len(pl.body), got[j].status, got[j].err, l)
						}
						got[j].body = "" // else a difference would be shown in full
					}
					if d := cmp.Diff(got[0], got[1], cmp.AllowUnexported(reply{}), cmp.Comparer(sameError)); d != "" {
						t.Errorf("%s, %s (-without the library +with it):\n%s", plain.paths[i].name, pl.name, d)
					}
					if want := strings.Repeat("yes", map[bool]int{true: 1}[pl.trailer]); got[1].trailer.Get("X-End") != want {
						t.Errorf("%s, %s: trailer %v", plain.paths[i].name, pl.name, got[1].trailer)
					}
				}
			}
		})
	}
}

func sameError(a, b error) bool { return a == b }
