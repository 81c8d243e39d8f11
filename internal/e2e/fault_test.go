package e2e_test

import (
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/extevict/extevict/abort"
	"github.com/extevict/extevict/extproc"
	"github.com/extevict/extevict/internal/envoy"
)

const sse = "text/event-stream"

// gzipped is the begin of a compressed event stream that ends, by its bytes, as an event
// does: gzip without compression up to the mark that ends the block.
func gzipped(s string) string {
	var b bytes.Buffer
	z, _ := gzip.NewWriterLevel(&b, gzip.NoCompression)
	io.WriteString(z, s)
	z.Flush()
	return strings.TrimSuffix(b.String(), "\x00\x00\x00\xff\xff")
}

// replyWith is a backend that reads the request and answers with a status, headers given
// in pairs, and a body in these pieces.
func replyWith(status int, header []string, pieces ...string) backend {
	return func(_ *call, w http.ResponseWriter, r *http.Request) error {
		if _, err := io.Copy(io.Discard, r.Body); err != nil {
			return err
		}
		for i := 0; i < len(header); i += 2 {
			w.Header().Set(header[i], header[i+1])
		}
		w.WriteHeader(status)
		for _, p := range pieces {
			if err := write(w, p); err != nil {
				return err
			}
		}
		return nil
	}
}

// sentTrailer is a backend that answers with what came as the request's trailer.
func sentTrailer(_ *call, w http.ResponseWriter, r *http.Request) error {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(w, "%s, %s", body, r.Trailer.Get("X-Sum"))
	return err
}

// hints is a backend that sends 103 before its answer.
func hints(then backend) backend {
	return func(c *call, w http.ResponseWriter, r *http.Request) error {
		if _, err := io.Copy(io.Discard, r.Body); err != nil {
			return err
		}
		w.Header().Set("Link", "</style.css>; rel=preload")
		w.WriteHeader(http.StatusEarlyHints)
		w.Header().Del("Link")
		return then(c, w, r)
	}
}

// stays is a backend that behaves like b and then neither ends nor goes on.
func stays(b backend) backend {
	return func(c *call, w http.ResponseWriter, r *http.Request) error {
		if err := b(c, w, r); err != nil {
			return err
		}
		if err := http.NewResponseController(w).Flush(); err != nil {
			return err
		}
		c.set(wrote)
		<-r.Context().Done()
		return context.Cause(r.Context())
	}
}

// request sends the call with any method and a request trailer, and reads the response
// into sink.
func (w *world) request(t *testing.T, c *call, method, sum string, sink io.Writer) {
	w.mu.Lock()
	w.calls[c.uri] = c
	w.mu.Unlock()
	go func() { // ends with the response
		defer c.set(done)
		req, err := http.NewRequestWithContext(t.Context(), method, c.path.url+c.uri, c.body)
		if err != nil {
			c.reply.err = err
			return
		}
		req.Header = c.header
		if sum != "" {
			req.ContentLength, req.Trailer = -1, http.Header{"X-Sum": {sum}}
		}
		resp, err := c.path.client.Do(req)
		if err != nil {
			c.reply.err = err
			return
		}
		defer resp.Body.Close()
		n, err := 0, error(nil)
		buf := make([]byte, 256<<10)
		for err == nil {
			var k int
			k, err = resp.Body.Read(buf)
			sink.Write(buf[:k])
			if n += k; c.enough > 0 && n >= c.enough {
				c.set(hasEnough)
			}
		}
		if err == io.EOF {
			err = nil
		}
		c.reply = reply{resp.StatusCode, resp.Header, resp.Trailer, resp.ContentLength, resp.Close, "", err}
	}()
}

// TestUntouched sends responses of unusual shapes through an ext_proc server without the
// library and one with it: status, headers, bytes and trailers are what the backend
// sent, and nothing differs.
func TestUntouched(t *testing.T) {
	unicode := "data: é漢\U0001F600\r\n\r\ndata: é\n\ndata: \xff\n\n"
	compressed := gzipped(events(20))
	rows := []struct {
		name, method, sum string
		backend           backend
		status            int
		body              string
	}{
		{"empty writes", "POST", "", replyWith(200, []string{"Content-Type", sse}, "", event(0), "", "", event(1), ""), 200, events(2)},
		{"inside characters", "POST", "", replyWith(200, []string{"Content-Type", sse}, strings.Split(unicode, "")...), 200, unicode},
		{"byte by byte", "POST", "", replyWith(200, []string{"Content-Type", sse}, eachByte(unicode)...), 200, unicode},
		{"keep-alives", "POST", "", replyWith(200, []string{"Content-Type", sse}, ": keep-alive\n\n", event(0), ":\n", ":\r\n\r\n", event(1)), 200, ": keep-alive\n\n" + event(0) + ":\n:\r\n\r\n" + event(1)},
		{"gzip", "POST", "", replyWith(200, []string{"Content-Type", sse, "Content-Encoding", "gzip"}, compressed[:7], compressed[7:]), 200, compressed},
		{"HEAD", "HEAD", "", replyWith(200, []string{"Content-Type", "application/json", "Content-Length", "1000"}), 200, ""},
		{"204", "DELETE", "", replyWith(204, nil), 204, ""},
		{"304", "GET", "", replyWith(304, []string{"Etag", `"e"`}), 304, ""},
		{"no body", "POST", "", replyWith(200, []string{"Content-Length", "0"}), 200, ""},
		{"error without body", "POST", "", replyWith(503, []string{"Content-Length", "0", "Retry-After", "3"}), 503, ""},
		{"103", "POST", "", hints(finishes), 200, events(3) + last},
		{"request trailer", "POST", "7", sentTrailer, 200, `{"model":"m"}, 7`},
	}
	for _, m := range modes {
		t.Run(m.String(), func(t *testing.T) {
			bare, with := start(t, setup{mode: m, adopt: bare}), start(t, setup{mode: m})
			for i := range with.paths {
				for _, x := range rows {
					var got [2]reply
					for j, w := range []*world{bare, with} {
						c := newCall(w.paths[i], x.backend)
						if x.method != http.MethodPost {
							c.body = nil
						}
						var body strings.Builder
						w.request(t, c, x.method, x.sum, &body)
						c.must(t, done, backendDone)
						got[j] = c.reply
						if body.String() != x.body || c.reply.status != x.status || c.reply.err != nil {
							t.Errorf("%s, %s: the client got %d, %q, %v; want %d, %q", c.path.name, x.name, c.reply.status, body.String(), c.reply.err, x.status, x.body)
						}
						got[j].header.Del("Date")
						got[j].header.Del("X-Envoy-Upstream-Service-Time")
					}
					if d := cmp.Diff(got[0], got[1], cmp.AllowUnexported(reply{})); d != "" {
						t.Errorf("%s, %s (-without the library +with it):\n%s", with.paths[i].name, x.name, d)
					}
				}
			}
		})
	}
}

func eachByte(s string) (all []string) {
	for i := range len(s) {
		all = append(all, s[i:i+1])
	}
	return all
}

// TestUnusualEnd evicts calls whose responses have unusual shapes. Each end is one of
// those that there are, and an error event comes only behind a whole event that is not
// compressed.
func TestUnusualEnd(t *testing.T) {
	// Whether there is a victim, what the client gets, and the answer.
	const want = `
		NONE                  HEAD-waiting       1  429         unknown
		NONE                  103-waiting        1  429         unknown
		NONE                  HEAD-held          0  200         none
		NONE                  204-held           0  204         none
		NONE                  no-body-held       0  200         none
		NONE                  gzip               1  sent,reset  reset
		NONE                  103                1  sent,reset  reset
		STREAMED              HEAD-waiting       1  429         status
		STREAMED              103-waiting        1  429         status
		STREAMED              HEAD-held          0  200         none
		STREAMED              204-held           0  204         none
		STREAMED              no-body-held       0  200         none
		STREAMED              gzip               1  sent,reset  reset
		STREAMED              103                1  sent,reset  reset
		BUFFERED              HEAD-waiting       1  429         status
		BUFFERED              103-waiting        1  429         status
		BUFFERED              HEAD-held          0  200         none
		BUFFERED              204-held           0  204         none
		BUFFERED              no-body-held       0  200         none
		BUFFERED              gzip               1  429         status
		BUFFERED              103                1  429         status
		FULL_DUPLEX_STREAMED  HEAD-waiting       1  429         status
		FULL_DUPLEX_STREAMED  103-waiting        1  429         status
		FULL_DUPLEX_STREAMED  HEAD-held          0  200         none
		FULL_DUPLEX_STREAMED  204-held           0  204         none
		FULL_DUPLEX_STREAMED  no-body-held       0  200         none
		FULL_DUPLEX_STREAMED  gzip               1  sent,reset        reset
		FULL_DUPLEX_STREAMED  103                1  sent,error,reset  event
	`
	compressed := gzipped(events(20))
	got := make(map[string][]string) // rows by path
	for _, m := range modes {
		w := start(t, setup{mode: m})
		for _, x := range []struct {
			name, method string
			backend      backend
			hold         mark
			sent         string
		}{
			{"HEAD-waiting", "HEAD", waits, "", ""},
			{"103-waiting", "POST", hints(waits), "", ""},
			{"HEAD-held", "HEAD", replyWith(200, []string{"Content-Length", "1000"}), responseHeaders, ""},
			{"204-held", "DELETE", replyWith(204, nil), responseHeaders, ""},
			{"no-body-held", "POST", replyWith(200, []string{"Content-Length", "0"}), responseHeaders, ""},
			{"gzip", "POST", stays(replyWith(200, []string{"Content-Type", sse, "Content-Encoding", "gzip"}, compressed)), "", compressed},
			{"103", "POST", hints(begins), "", events(3)},
		} {
			for _, p := range w.paths {
				c := newCall(p, x.backend)
				c.hold, c.enough = x.hold, len(x.sent)
				if x.method != http.MethodPost {
					c.body = nil
				}
				var body strings.Builder
				w.request(t, c, x.method, "", &body)
				switch {
				case x.hold != "":
					c.must(t, holding)
				case x.sent == "":
					c.must(t, wrote)
				case m.buffers():
					c.must(t, wrote, replied(responseHeaders))
				default:
					c.must(t, hasEnough)
				}
				vs, err := w.evict(c)
				if err != nil {
					t.Fatal(err)
				}
				close(c.resume)
				c.must(t, done, backendDone, observed)
				client := fmt.Sprint(c.reply.status)
				if p.reset(c.reply.err) {
					client = "sent,reset"
				} else if c.reply.err != nil {
					client = c.reply.err.Error()
				}
				want := x.sent
				if c.event.Answer == extproc.AnswerEvent {
					client, want = "sent,error,reset", want+errorEvent
				}
				if c.reply.status == http.StatusTooManyRequests {
					if want = errorObject; x.method == http.MethodHead {
						want = ""
					}
				}
				if body.String() != want {
					t.Errorf("%s, %v, %s: the client got %q, want %q", p.name, m, x.name, body.String(), want)
				}
				got[p.name] = append(got[p.name], row(m, x.name, len(vs), client, c.event.Answer))
			}
		}
	}
	compareRows(t, want, got)
}

// TestEventBoundaries is TestErrorEvent for what else an event stream may end with.
func TestEventBoundaries(t *testing.T) {
	w := start(t, setup{mode: duplex})
	for _, x := range []struct{ name, sent, event string }{
		{"keep-alive", event(0) + ": keep-alive\n\n", errorEvent},
		{"comment", event(0) + ": keep-alive\n", ""},
		{"CRLF, then LF", "data: 0\r\n\n", errorEvent},
		{"inside a CRLF", "data: 0\r\n\r", ""},
		{"inside a character", event(0) + "data: \xf0\x9f", ""},
		{"compressed", gzipped(events(3)), ""},
	} {
		t.Run(x.name, func(t *testing.T) {
			header := http.Header{"Content-Type": {sse}}
			if x.name == "compressed" {
				header.Set("Content-Encoding", "gzip")
			}
			for _, p := range w.paths {
				w.checkEvent(t, p, header, x.sent, x.event)
			}
		})
	}
}

// TestHugeResponse lets a response of 100 MB through, evicts another in its middle, and
// has Envoy refuse one that it was told to buffer.
func TestHugeResponse(t *testing.T) {
	const total = 100 << 20
	piece := []byte(strings.Repeat("0123456789abcde\n", 16<<10)) // 256 KiB
	huge := func(_ *call, w http.ResponseWriter, r *http.Request) error {
		if _, err := io.Copy(io.Discard, r.Body); err != nil {
			return err
		}
		w.Header().Set("Content-Type", "application/octet-stream")
		for range total / len(piece) {
			if _, err := w.Write(piece); err != nil {
				return err
			}
		}
		return nil
	}
	h := sha256.New()
	for range total / len(piece) {
		h.Write(piece)
	}
	sum := h.Sum(nil)
	for _, m := range []mode{none, buffered, duplex} {
		t.Run(m.String(), func(t *testing.T) {
			w := start(t, setup{mode: m})
			for _, p := range w.paths {
				if m == buffered {
					c := newCall(p, huge)
					w.request(t, c, http.MethodPost, "", io.Discard)
					c.must(t, done, backendDone, observed)
					if l, err := w.line(c); c.reply.status != 500 || c.reply.err != nil || l.Details != "response_payload_too_large" || c.event.Outcome != abort.Closed || c.event.Obstacle != extproc.ObstacleNone {
						t.Errorf("%s: status %d, %v, log %+v, %v, %+v", p.name, c.reply.status, c.reply.err, l, err, c.event)
					}
					continue
				}
				if m == none && p.name == "h1" || m == duplex && p.name == "h2" { // each takes its time
					c := newCall(p, huge)
					h := sha256.New()
					w.request(t, c, http.MethodPost, "", h)
					c.must(t, done, backendDone, observed)
					if got := h.Sum(nil); c.reply.status != 200 || c.reply.err != nil || !bytes.Equal(got, sum) {
						t.Errorf("%s: status %d, %v, sum %x, want %x", p.name, c.reply.status, c.reply.err, got, sum)
					}
				}

				c := newCall(p, huge)
				c.enough = 10 << 20
				var got bytes.Buffer
				w.request(t, c, http.MethodPost, "", &got)
				c.must(t, hasEnough)
				if vs, err := w.evict(c); len(vs) != 1 || err != nil {
					t.Fatalf("%s: evicted %v, %v", p.name, vs, err)
				}
				c.must(t, done, backendDone, observed)
				for b := got.Bytes(); len(b) > 0; {
					n := min(len(b), len(piece))
					if !bytes.Equal(b[:n], piece[:n]) {
						t.Errorf("%s: other bytes", p.name)
						break
					}
					b = b[n:]
				}
				if n := got.Len(); n < c.enough || n >= total || !p.reset(c.reply.err) || c.served == nil || c.event.Answer != extproc.AnswerReset {
					t.Errorf("%s: %d bytes, %v, backend %v, %+v", p.name, n, c.reply.err, c.served, c.event)
				}
			}
		})
	}
}

// TestUpstreamFilter is the matrix for an ext_proc filter in the upstream's cluster,
// behind the router: it can be evicted like any other. The fake's is in front.
func TestUpstreamFilter(t *testing.T) {
	for _, m := range modes {
		t.Run(m.String(), func(t *testing.T) {
			testMatrix(t, setup{mode: m, filter: envoy.ExtProc{UpstreamFilter: true}})
		})
	}
}
