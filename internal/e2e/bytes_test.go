package e2e_test

import (
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// A payload goes to the backend, and another comes back, cut into other pieces.
type payload struct {
	name        string
	there, back string
	piece       int // size of the pieces at most
	contentType string
	length      bool // with content-length
	trailer     bool
}

// serve is the backend.
func (p payload) serve(_ *call, w http.ResponseWriter, r *http.Request) error {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return err
	}
	if string(body) != p.there {
		return fmt.Errorf("%d bytes of %d arrived", len(body), len(p.there))
	}
	w.Header().Set("Content-Type", p.contentType)
	if p.length {
		w.Header().Set("Content-Length", strconv.Itoa(len(p.back)))
	}
	if p.trailer {
		w.Header().Set("Trailer", "X-End")
		defer w.Header().Set("X-End", "yes")
	}
	for rest := p.back; rest != ""; {
		n := min(1+rand.IntN(p.piece), len(rest))
		if err := write(w, rest[:n]); err != nil {
			return err
		}
		rest = rest[n:]
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
				{"split SSE", `{"stream":true}`, events(300), 40, "text/event-stream", false, false},
				{"length", big[1000:2000], big[:1000], 300, "application/json", true, false},
				{"trailer", big[:1000], big[:2000], 300, "application/json", false, true},
				{"one byte", "x", "y", 1, "text/plain", true, false},
				{"large there", big[:min(len(big), 2<<20)], "z", 1, "text/plain", true, false},
			}
			plain, wrapped := start(t, setup{mode: m, adopt: bare}), start(t, setup{mode: m})
			for i := range plain.paths {
				for _, pl := range payloads {
					want, got := pl.send(t, plain, plain.paths[i]), pl.send(t, wrapped, wrapped.paths[i])
					if d := cmp.Diff(want, got, cmp.AllowUnexported(reply{})); d != "" {
						t.Errorf("%s, %s (-without the library +with it):\n%s", plain.paths[i].name, pl.name, d)
					}
				}
				pl := payload{"large", "x", big, 64 << 10, "application/octet-stream", false, false}
				pl.send(t, wrapped, wrapped.paths[i])
			}
		})
	}
}

// send sends the payload and checks what comes back. It returns the rest of the reply.
func (pl payload) send(t *testing.T, w *world, p *path) reply {
	t.Helper()
	c := newCall(p, pl.serve)
	c.header = http.Header{"Content-Type": {pl.contentType}}
	c.body = strings.NewReader(pl.there)
	w.start(t.Context(), c)
	c.must(t, done)
	r := c.reply
	if r.body != pl.back || r.err != nil || r.status != 200 || (r.trailer.Get("X-End") == "yes") != pl.trailer {
		l, err := w.line(c)
		t.Errorf("%s, %s: %d bytes of %d came back, status %d, trailer %v, %v; access log %+v, %v",
			p.name, pl.name, len(r.body), len(pl.back), r.status, r.trailer, r.err, l, err)
	}
	delete(r.header, "Date")
	delete(r.header, "X-Envoy-Upstream-Service-Time")
	r.body, r.err = "", nil
	return r
}
